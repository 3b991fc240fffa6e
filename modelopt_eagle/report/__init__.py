"""The page of a run, and several runs compared. See ``docs/validation.md``."""

from modelopt_eagle.report.compare import write_comparison
from modelopt_eagle.report.facts import RunFacts, facts_of, read_run
from modelopt_eagle.report.page import write_page

__all__ = ["RunFacts", "facts_of", "read_run", "write_comparison", "write_page"]
