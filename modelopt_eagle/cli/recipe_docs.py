"""Write docs/recipes.md from the recipe's schema, or check that it is up to date; without a clone, print it."""

from __future__ import annotations

from pathlib import Path

from modelopt_eagle.common.parser import command_parser
from modelopt_eagle.errors import RecipeError


def main(argv: list[str] | None = None) -> int:
    """Print, write or check the page; raises RecipeError when ``--check`` finds it out of date."""
    from modelopt_eagle.recipe.docs import PAGE, docs_path, recipe_docs

    parser = command_parser("recipe-docs", __doc__, example="modelopt-eagle recipe-docs --output -")
    parser.add_argument(
        "--output",
        default=docs_path() or "-",
        metavar="PATH",
        help=f"the page, or a folder for {PAGE}, or - to print it (%(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 2 if the page is out of date")
    args = parser.parse_args(argv)
    text = recipe_docs()
    if str(args.output) == "-":
        if args.check:
            raise RecipeError(
                "--check compares a page with the schema, and there is no clone here: name it by --output"
            )
        print(text, end="")
        return 0
    page = Path(args.output)
    page = page / PAGE if page.is_dir() or not page.suffix else page
    if args.check:
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            raise RecipeError(f"{page} differs from the schema: run modelopt-eagle recipe-docs")
        print(f"{page} is up to date")
        return 0
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
    return 0
