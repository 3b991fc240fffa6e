"""Tests in two processes side by side (``pytest -n 2``, as ``scripts/test.sh`` asks for): which process runs what."""

from xdist.scheduler import LoadScopeScheduling


class ByFile(LoadScopeScheduling):
    """Hands out files in the order of the collection, and a folder that shares what it trains as one file.

    Each is named when it is handed out, so that the last line of a run that hangs says where.

    Args:
        config: pytest's.
        log: pytest-xdist's.
        together: such a folder, as the names of its tests begin.
    """

    def __init__(self, config, log, together):
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._together = together

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        return self._together if file.startswith(f"{self._together}/") else file

    def _assign_work_unit(self, node):
        terminal = self.config.get_terminal_writer()
        if terminal.width_of_current_line:  # behind some dots
            terminal.line()
        terminal.line(f"{node.gateway.id}: {next(iter(self.workqueue))}")
        super()._assign_work_unit(node)


def sendable(value):
    """A report's content with halves of characters, which a test may have logged, as escapes: others are not sent."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {sendable(key): sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(sendable(item) for item in value)
    return value
