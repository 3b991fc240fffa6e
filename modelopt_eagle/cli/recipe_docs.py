"""Write docs/recipes.md from the recipe's schema, or check that it is up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from modelopt_eagle.errors import RecipeError


def main(argv: list[str] | None = None) -> int:
    """Write or check the page; raises RecipeError when ``--check`` finds it out of date."""
    from modelopt_eagle.recipe.docs import docs_path, recipe_docs

    parser = argparse.ArgumentParser(prog="modelopt-eagle recipe-docs", description=__doc__)
    parser.add_argument("--output", type=Path, default=docs_path(), help="the page (%(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 2 if the page is out of date")
    args = parser.parse_args(argv)
    text = recipe_docs()
    if args.check:
        if not args.output.is_file() or args.output.read_text(encoding="utf-8") != text:
            raise RecipeError(f"{args.output} differs from the schema: run modelopt-eagle recipe-docs")
        print(f"{args.output} is up to date")
        return 0
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text, encoding="utf-8")
    print(f"wrote {args.output}")
    return 0
