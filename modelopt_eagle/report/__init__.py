"""The page of a run, several runs compared, and a bench. See ``docs/validation.md`` and ``docs/bench.md``."""

from modelopt_eagle.report.bench import write_bench
from modelopt_eagle.report.compare import write_comparison
from modelopt_eagle.report.facts import RunFacts, facts_of, read_run
from modelopt_eagle.report.page import write_page, write_sheet

__all__ = ["RunFacts", "facts_of", "read_run", "write_bench", "write_comparison", "write_page", "write_sheet"]
