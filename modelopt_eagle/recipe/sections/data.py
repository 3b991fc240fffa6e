"""Recipe section ``data``: the conversations, and where the target's features of them come from."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from modelopt_eagle.common.lists import split_list
from modelopt_eagle.recipe.bounds import need
from modelopt_eagle.recipe.sections.base import Positive, Section, Share


class DataSection(Section):
    """The conversations, and where the target's features of them come from."""

    train_path: str | list[str] = Field(
        "quickstart",
        description="File(s), patterns, folders or hub data sets of conversations (docs/data.md lists what is read), "
        "or `quickstart` (the conversations shipped). With `offline_data_path` the rows come from the store instead.",
    )
    eval_path: str | list[str] | None = Field(
        None,
        description="JSONL file(s) of held-out conversations for the acceptance walk while training; several get a "
        "number each, besides the pooled one.",
    )
    max_length: Annotated[int, Field(ge=16)] = Field(
        2048,
        description="Training window in tokens; longer conversations are handled by `overlong` and counted. It is not "
        "the limit declared to engines: the exported `max_position_embeddings` stays the target's.",
    )
    overlong: Literal["truncate", "drop"] = Field(
        "truncate", description="What happens to a conversation longer than `max_length`: cut at its end, or left out."
    )
    unknown_role: Literal["fail", "drop"] = Field(
        "fail", description="A role that is neither known nor in `role_aliases`: stop, or leave the row out, counted."
    )
    role_aliases: dict[str, Literal["system", "user", "assistant"]] = Field(
        default_factory=dict, description="Further role names: `{my_model_v2: assistant}`."
    )
    supervise_reasoning: bool = Field(
        True, description="Learn the reasoning in front of an answer; false: it is context, and the answer is learned."
    )
    supervise_tool_calls: bool = Field(
        True, description="Learn the calls of tools in an answer; false: they are context."
    )
    template_arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables of the chat template for every row, as a server is given them: `{enable_thinking: "
        "false}`. A row's own `chat_template_kwargs` win.",
    )
    template_date: str | None = Field(
        None,
        description="The day, as YYYY-MM-DD, that a chat template is told which prints today's date; null: the day the "
        "run began, kept in its folder, or that of the store it reads.",
    )
    workers: Positive = Field(
        1,
        description="Processes that render and tokenise conversations, the one that reads them among them; worth it "
        "from some ten thousand rows on.",
    )
    min_used_share: Share = Field(
        0.2,
        description="Stop if less than this share of the rows read, or of their tokens, is used: the rest was dropped "
        "or cut, for the reasons that are named.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Columns under other names: `{prompt: question, completion: best_answer}` (docs/data.md lists "
        "ours).",
    )
    text_boundary: str | list[str] | None = Field(
        None,
        description="For rows of `text` that are formatted already: what stands before an answer, or that and what "
        "ends it, as a list of two.",
    )
    max_rows: Positive | None = Field(None, description="Use only the first rows of the data; null: all.")
    offline_data_path: str | None = Field(
        None,
        description="Folder of dumped features: train from it, without running the target. A feature store, or a dump "
        "of Model-Optimizer, SpecForge or speculators as it is.",
    )
    offline_final_states: Literal["normed", "pre-norm"] | None = Field(
        None,
        description="Whether the final states of another tool's dump are after or before the final norm, where its "
        "files do not say it.",
    )
    offline_all_supervised: bool = Field(
        False, description="Train on every token of another tool's dump that holds no loss mask."
    )
    cache_features: Literal["none", "memory", "disk"] = Field(
        "none",
        description="Run the target over the data once, keep its features in memory or in a store under `output_dir`, "
        "and train all epochs from them.",
    )
    streaming_server_url: str | None = Field(
        None, description="Feature server(s) to train from, comma-separated: `http://host:8000,http://other:8000`."
    )
    streaming_transport: Literal["auto", "shm", "tcp", "nixl"] = Field(
        "auto",
        description="How states come from the server: shared memory (same host), TCP, NIXL (needs `nixl-cu12` or "
        "`nixl-cu13` on both sides); auto: shared memory on loopback, else TCP.",
    )
    on_missing: Literal["fail", "generate", "skip"] = Field(
        "fail",
        description="A row of `train_path` that the store at `offline_data_path` lacks: stop, compute it (by the "
        "server, or by the target here) and store it, or skip it, counted.",
    )
    shuffle: bool = Field(True, description="New order of the conversations in every epoch, drawn from the seed.")

    @property
    def asks_servers(self) -> bool:
        """Whether features come from ``streaming_server_url``."""
        return self.streaming_server_url is not None

    @property
    def fills_store(self) -> bool:
        """Whether the rows of ``train_path`` are looked up in a store that may lack some."""
        return self.offline_data_path is not None and self.on_missing != "fail"

    @property
    def runs_target(self) -> bool:
        """Whether the run loads the target itself, and not only its tables."""
        if self.asks_servers:
            return False
        return self.offline_data_path is None or self.on_missing == "generate"

    @field_validator("train_path", "eval_path")
    @classmethod
    def _paths_are_named(cls, value: str | list[str] | None) -> str | list[str] | None:
        need(value is None or (bool(value) and all(value)), "expected a path or a list of paths, found an empty one")
        return value

    @field_validator("text_boundary")
    @classmethod
    def _boundary_is_one_or_two(cls, value: str | list[str] | None) -> str | list[str] | None:
        marks = [value] if isinstance(value, str) else value
        need(marks is None or (len(marks) in (1, 2) and all(marks)), f"expected one or two texts, found {value!r}")
        return value

    @field_validator("template_date")
    @classmethod
    def _date_is_a_day(cls, value: str | None) -> str | None:
        need(value is None or _is_day(value), f"expected a day as YYYY-MM-DD, found {value!r}")
        return value

    @field_validator("template_arguments")
    @classmethod
    def _arguments_have_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        wrong = [name for name in value if not name.isidentifier()]
        need(not wrong, f"expected names of the template's variables, such as enable_thinking, found {wrong}")
        return value

    @field_validator("streaming_server_url")
    @classmethod
    def _urls_are_http(cls, value: str | None) -> str | None:
        for url in split_list(value) if value is not None else []:
            need(
                re.match(r"https?://[^/\s]+", url),
                f"expected http://HOST:PORT (several: comma-separated), found {url!r}",
            )
        return value

    @model_validator(mode="after")
    def _one_feature_source(self) -> DataSection:
        stored, streamed = self.offline_data_path is not None, self.streaming_server_url is not None
        need(
            not (stored and streamed) or self.on_missing == "generate",
            "offline_data_path and streaming_server_url are two feature sources: set one of them to null, or "
            "on_missing: generate to let the server fill the store",
        )
        for name, given in (
            ("offline_final_states", self.offline_final_states is not None),
            ("offline_all_supervised", self.offline_all_supervised),
        ):
            need(
                not given or (stored and self.on_missing == "fail"),
                f"{name} speaks of another tool's dump: set offline_data_path to it and leave on_missing at fail, or "
                "leave it out",
            )
        need(
            stored or self.on_missing == "fail",
            f"on_missing: {self.on_missing} speaks of rows missing from a store: set offline_data_path, or leave it at "
            "fail",
        )
        need(
            streamed or self.streaming_transport == "auto",
            "streaming_transport speaks of a feature server: set streaming_server_url, or leave it at auto",
        )
        need(
            not (stored or streamed) or self.cache_features == "none",
            f"cache_features: {self.cache_features} keeps what the target computes in this run: set it to none with "
            "offline_data_path or streaming_server_url",
        )
        return self

    @model_validator(mode="after")
    def _given_keys_are_read(self) -> DataSection:
        stored, streamed = self.offline_data_path is not None, self.streaming_server_url is not None
        need(
            self.eval_path is None or not (stored or streamed),
            "eval_path needs the features of a loaded target, and this run takes them from offline_data_path or "
            "streaming_server_url: set eval_path to null (rows are held out of the data)",
        )
        if stored and self.on_missing == "fail":
            given = [key for key in OF_CONVERSATIONS if key in self.changed()]
            need(
                not given,
                f"{', '.join(given)} says how conversations are read, and the rows of offline_data_path are tokenised "
                "already: leave it out (it is for the dump that makes them)",
            )
            need(
                "train_path" not in self.changed(),
                f"train_path is {self.train_path}, and the rows are those of offline_data_path: leave train_path out "
                "(--data), or set on_missing to generate or skip to look its rows up in the store",
            )
        return self


OF_CONVERSATIONS = (
    "unknown_role", "role_aliases", "supervise_reasoning", "supervise_tool_calls", "workers", "min_used_share",
    "columns", "text_boundary",
)  # fmt: skip
"""Keys that nothing reads where the rows are those of a store."""


def _is_day(text: str) -> bool:
    try:
        datetime.datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        return False
    return True
