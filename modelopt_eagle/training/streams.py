"""Sources that ask running feature servers, or fill a store while training."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from modelopt_eagle.common.lists import split_list
from modelopt_eagle.data.packed import chosen_rows
from modelopt_eagle.data.vocab import count_supervised
from modelopt_eagle.features import FeatureContract, HybridSource, OfflineSource, SelectedSource, StreamedSource
from modelopt_eagle.features.compute import compute_features
from modelopt_eagle.features.store import dataset_hash
from modelopt_eagle.recipe import Recipe
from modelopt_eagle.target.like import TableTarget
from modelopt_eagle.training.budget import FEATURES_UNTIL
from modelopt_eagle.training.data import RunData, held_out_line, held_out_rows, read_data
from modelopt_eagle.training.given import Given
from modelopt_eagle.training.shared_rows import RowsOfARun

TOKEN_VARIABLE = "MODELOPT_EAGLE_STREAM_TOKEN"
"""Environment variable of the secret that servers off loopback ask for; a recipe is no place for it."""

PATIENCE = 600.0
"""Seconds that servers which do not answer are waited for, where the run has no budget."""


def patience(recipe: Recipe) -> float:
    """Seconds that servers which do not answer are waited for: no longer than the run has for its features."""
    minutes = recipe.training.run_budget_minutes
    return PATIENCE if minutes is None else min(PATIENCE, FEATURES_UNTIL * 60.0 * minutes)


def from_servers_or_filled_store(
    recipe: Recipe, target: TableTarget, aux_layer_ids, accelerator, say, given: Given | None = None
) -> RunData:
    """Features for a recipe whose ``data`` asks servers or fills a store.

    Args:
        target: its tables, or the whole where it fills the store.
        given: rows in memory in place of files.

    Raises:
        StreamError: no server, or one that does not fit.
        FeatureError: a store that does not fit.
    """
    shared = RowsOfARun(Path(recipe.training.output_dir), accelerator)
    dataset = read_data(recipe, target, recipe.data.train_path, None if given is None else given.data, shared=shared)
    contract = FeatureContract.from_identity(target.identity(), aux_layer_ids, "bfloat16")
    contract = replace(contract, end_token_ids=target.end_token_ids)
    header = dataset.header().splitlines()
    cancel = None
    if recipe.data.asks_servers:
        urls = split_list(recipe.data.streaming_server_url)
        token = os.environ.get(TOKEN_VARIABLE)
        transport = recipe.data.streaming_transport
        source = StreamedSource(
            urls, dataset, target, contract.aux_layer_ids, token=token, transport=transport, patience=patience(recipe)
        )
        header.append(f"features: from {', '.join(urls)}")
        make, cancel = source.fetch_rows, source.cancel
    elif recipe.data.on_missing == "generate":

        def make(rows):
            return compute_features(target, rows, contract.aux_layer_ids)

    else:
        make = None
    rows = dataset.rows
    if recipe.data.fills_store:
        folder = recipe.data.offline_data_path
        source = HybridSource(
            folder,
            dataset,
            contract,
            on_missing=recipe.data.on_missing,
            make=make,
            cancel=cancel,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            barrier=accelerator.wait_for_everyone,
        )
        if source.found:
            OfflineSource(folder, verify="read").check_teacher(target.head, final_norm=target.final_norm)
        rows = source.rows
        header.append(f"features: {folder} ({source.contract.dtype}), {source.skipped} rows that it lacks are skipped")
    chosen = set(held_out_rows(len(rows)))
    parts = [[n for n in range(len(rows)) if (n in chosen) == held] for held in (False, True)]
    header.append(held_out_line(len(parts[1])))
    for line in header:
        say(line)
    train = chosen_rows(rows, parts[0])
    return RunData(
        SelectedSource(source, parts[0]),
        SelectedSource(source, parts[1]) if parts[1] else None,
        count_supervised(train, contract.vocab_size),
        header,
        dataset_hash(train),
        dataset.report,
    )
