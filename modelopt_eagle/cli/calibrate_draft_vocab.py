"""Choose the draft vocabulary from the tokens that the assistant's turns use, and save the map."""

import argparse
from pathlib import Path

from modelopt_eagle.common.parser import CommandParser, command_parser
from modelopt_eagle.recipe.command_line import add_target_options

ARGMAX_ROWS = 64
"""Conversations that the target is run on."""


def build_parser() -> CommandParser:
    """The command line."""
    parser = command_parser(
        "calibrate-draft-vocab",
        __doc__,
        example="modelopt-eagle calibrate-draft-vocab --model NAME --data a.jsonl --draft_vocab_size 9000 --save_dir m",
    )
    parser.add_argument("--model", required=True, help="target: hub id, local folder, GGUF file, or quickstart")
    parser.add_argument(
        "--data", required=True, nargs="+", help="conversations: .jsonl files, hub names, or quickstart"
    )
    parser.add_argument("--draft_vocab_size", required=True, type=int, help="tokens the draft can propose")
    parser.add_argument("--save_dir", required=True, type=Path, help="folder for the map and its record")
    parser.add_argument("--max_length", type=int, help="count only this many tokens of each conversation")
    parser.add_argument("--unknown_role", default="fail", choices=("fail", "drop"), help="what an unknown role does")
    parser.add_argument(
        "--role_alias", action="append", default=[], metavar="NAME=ROLE", help="further role name; may be repeated"
    )
    parser.add_argument("--max_rows", type=int, help="read only this many conversations")
    parser.add_argument("--workers", type=int, default=1, help="processes that render (default 1)")
    add_target_options(parser)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument(
        "--argmax_rows",
        type=int,
        default=ARGMAX_ROWS,
        help="run the target on this many conversations, spread over the data, for the share of its argmax tokens "
        f"inside (default {ARGMAX_ROWS}; 0: do not run it)",
    )
    measured.add_argument("--features", type=Path, help="the same over all rows of a feature store of the target")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; raises ``EagleError`` for bad input.

    Returns:
        the exit code.
    """
    arguments = build_parser().parse_args(argv)

    from modelopt_eagle.data.dataset import prepare_dataset
    from modelopt_eagle.data.vocab import choose_draft_vocab, count_predictions, coverage_of, save_draft_vocab
    from modelopt_eagle.errors import CheckpointError, DataError
    from modelopt_eagle.target.identity import tokenizer_hash
    from modelopt_eagle.target.load import load_config, load_tokenizer, resolve
    from modelopt_eagle.target.stops import find_end_token_ids, read_generation_config
    from modelopt_eagle.target.vision import vision_of

    place = resolve(arguments.model)
    options = (arguments.revision, bool(arguments.trust_remote_code))
    config, tokenizer = load_config(place, *options), load_tokenizer(place, *options, arguments.chat_template)
    vocab_size = config.get_text_config().vocab_size
    if arguments.draft_vocab_size > vocab_size:  # before the data are read
        raise CheckpointError(
            f"--draft_vocab_size {arguments.draft_vocab_size} is larger than the target's vocabulary of {vocab_size} "
            "tokens: ask for at most that"
        )
    if arguments.argmax_rows < 0:
        raise DataError(f"--argmax_rows must be at least 0, found {arguments.argmax_rows}")
    ends = find_end_token_ids(
        tokenizer, read_generation_config(place, arguments.revision), config, config.get_text_config()
    )
    dataset = prepare_dataset(
        tokenizer,
        arguments.data,
        unknown_role=arguments.unknown_role,
        role_aliases=_aliases(arguments.role_alias),
        max_rows=arguments.max_rows,
        max_length=arguments.max_length,
        end_token_ids=ends,
        workers=arguments.workers,
        vision=vision_of(tokenizer, place, config, *options),
    )
    print(dataset.header())
    choice = choose_draft_vocab(dataset.rows, tokenizer, vocab_size, arguments.draft_vocab_size, ends)
    print(choice.describe())
    record = {
        "model": arguments.model,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": dataset.template_hash,
        "data": [str(source) for source in arguments.data],
        "supervised_tokens": dataset.report.supervised,
        "distinct_tokens": choice.seen,
        "coverage": choice.coverage,
    }
    predictions = _predictions(arguments, dataset, record["tokenizer_hash"])
    if predictions is not None:
        counts = count_predictions(predictions, vocab_size)
        record["target_argmax_coverage"] = coverage_of(counts, choice.vocab)
        record["target_argmax_tokens"] = int(counts.sum())
        print(f"{record['target_argmax_coverage']:.2%} of the target's {int(counts.sum())} argmax tokens are inside")
    print(f"saved to {save_draft_vocab(arguments.save_dir, choice.vocab, record)}")
    return 0


def _aliases(pairs: list[str]) -> dict[str, str]:
    from modelopt_eagle.errors import DataError

    aliases = {}
    for pair in pairs:
        name, separator, role = pair.partition("=")
        if not separator:
            raise DataError(f"--role_alias expects NAME=ROLE, such as my_model_v2=assistant; found {pair!r}")
        aliases[name] = role
    return aliases


def _predictions(arguments: argparse.Namespace, dataset, tokenizer_hash: str):
    """The target's argmaxes at the positions that predict a supervised token, or None when not asked for."""
    if arguments.features:
        from modelopt_eagle.errors import FeatureError
        from modelopt_eagle.features import OfflineSource

        source = OfflineSource(arguments.features)
        if source.contract.tokenizer_hash != tokenizer_hash:
            raise FeatureError(
                f"{arguments.features} was made with another tokenizer (hash {source.contract.tokenizer_hash}; "
                f"{arguments.model} has {tokenizer_hash}); give a store of this target"
            )
        return (source.row(number).target_top1 for number in range(len(source.lengths)))
    count = min(arguments.argmax_rows, len(dataset.rows))
    if count:
        return _run_target(arguments, [dataset.rows[i * len(dataset.rows) // count] for i in range(count)])
    return None


def _run_target(arguments: argparse.Namespace, rows):
    from modelopt_eagle.common.console import ProgressBar
    from modelopt_eagle.features.compute import compute_rows
    from modelopt_eagle.recipe.command_line import target_arguments
    from modelopt_eagle.target import load_target

    target = load_target(**target_arguments(arguments, arguments.model))
    bar = ProgressBar(len(rows), "target argmax")
    for _, row in compute_rows(target, rows, (0,), batch_tokens=2048):  # a layer must be named; no use is made of it
        yield row.target_top1
        bar.advance(1)
