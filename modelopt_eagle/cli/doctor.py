"""Find before training what makes heads fail later, and say what mends it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.recipe import Recipe

if TYPE_CHECKING:
    from modelopt_eagle.training.doctor import Finding

FAULTS = 1


def build_parser() -> CommandParser:
    """The command line; parse with ``parse_intermixed_args``."""
    from modelopt_eagle.recipe.command_line import add_recipe_arguments

    parser = command_parser("doctor", __doc__, example="modelopt-eagle doctor --data chats.jsonl --model NAME")
    parser.add_argument("--data", nargs="+", metavar="FILE", help="conversations; default: those of the recipe")
    parser.add_argument("--model", metavar="NAME", help="the target; default: that of the recipe")
    parser.add_argument("--without-target", action="store_true", help="look at data, template and disk only")
    add_recipe_arguments(parser, default="quickstart")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 where a fault was found.

    Raises:
        EagleError: a recipe, data or a target that cannot be read at all.
    """
    from modelopt_eagle.recipe.command_line import data_flag, recipe_from_arguments
    from modelopt_eagle.training.doctor import FAULT, WARNING

    arguments = build_parser().parse_intermixed_args(argv)
    flags = [("model.base_model", arguments.model), data_flag(arguments)]
    recipe, counts = recipe_from_arguments(arguments, flags), {WARNING: 0, FAULT: 0}
    for finding in findings(recipe, not arguments.without_target):
        print(finding.line(), flush=True)
        if finding.level in counts:
            counts[finding.level] += 1
    print(f"{counts[FAULT]} faults, {counts[WARNING]} warnings")
    return FAULTS if counts[FAULT] else 0


def findings(recipe: Recipe, with_target: bool = True) -> Iterator[Finding]:
    """Everything that is looked at, the cheap things first.

    Raises:
        EagleError: what is looked at cannot be read.
    """
    from modelopt_eagle.cli._tokenised import tokenised
    from modelopt_eagle.cli.estimate import RowSizes, estimate
    from modelopt_eagle.data.packed import row_lengths, supervised_counts
    from modelopt_eagle.errors import EagleError
    from modelopt_eagle.target import load_target
    from modelopt_eagle.target.load import check_device, load_tokenizer, resolve
    from modelopt_eagle.training import doctor
    from modelopt_eagle.training.given import Given
    from modelopt_eagle.training.prechecks import check_paths, use_chat_settings
    from modelopt_eagle.training.run import layer_ids

    check_device(recipe.model.device)
    check_paths(recipe, Given())
    data, source = tokenised(recipe)
    place = resolve(recipe.model.base_model)
    own = load_tokenizer(place, recipe.model.revision, recipe.model.trust_remote_code)
    template = own.get_chat_template() if getattr(own, "chat_template", None) else None
    window = getattr(source.config, "max_position_embeddings", None)
    yield from doctor.data_findings(recipe, data, source.tokenizer, template, window)
    held = [] if recipe.data.eval_path is None else tokenised(recipe, recipe.data.eval_path)[0].rows
    yield from doctor.duplicate_findings(data.rows, held)
    try:
        sizes = estimate(recipe, RowSizes(row_lengths(data.rows), supervised_counts(data.rows)))
    except EagleError as error:
        found = f"{error} (disk and memory are not looked at before; the target is, with a default head)"
        yield doctor.Finding(doctor.FAULT, "head", found, "mend the key that is named")
        recipe = recipe.model_copy(update={"eagle": type(recipe.eagle)()})
    else:
        kept = sizes.feature_bytes if recipe.data.cache_features == "disk" else 0
        checkpoints = sizes.checkpoint_bytes * ((recipe.training.save_total_limit or 3) + 1)
        memory = sizes.target_bytes + sizes.training_bytes
        memory += sizes.feature_bytes if recipe.data.cache_features == "memory" else 0
        yield from doctor.room_findings(recipe, checkpoints + kept, memory)
    if not with_target or not recipe.data.runs_target:
        return
    target = load_target(**recipe.model.decoding_arguments())
    use_chat_settings(recipe, target)
    yield from doctor.target_findings(recipe, target, data, layer_ids(recipe, target.config))
    yield _can_be_validated(recipe, target, data)


def _can_be_validated(recipe, target, data) -> Finding:
    """Whether the target decodes here, as validation will ask it to."""
    from modelopt_eagle.decoding import PlainGenerator
    from modelopt_eagle.decoding.verifiable import refusal
    from modelopt_eagle.errors import EagleError
    from modelopt_eagle.training.doctor import FAULT, GOOD, Finding

    if recipe.validation.mode == "none":
        return Finding(GOOD, "validation", "none: the head will be exported unmeasured")
    if (reason := refusal(recipe, target)) is not None:
        return Finding(FAULT, "validation", reason, "or set validation.mode: none")
    prompts = [row.input_ids[: row.prompt_length] for row in data.rows if row.images is None and row.prompt_length]
    if not prompts:
        return Finding(GOOD, "validation", "not tried: no row has a prompt of text alone")
    try:
        PlainGenerator(target).generate([min(prompts, key=len)], 4)
    except EagleError as error:
        return Finding(FAULT, "validation", str(error), "set validation.mode: none, or choose another target")
    return Finding(GOOD, "validation", "the target decodes here")
