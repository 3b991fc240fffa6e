"""The page of a run: whole, well formed, harmless whatever the data hold, and honest about what is missing."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import CheckpointError
from modelopt_eagle.report import plots, read_run, write_comparison, write_page
from modelopt_eagle.report.facts import by_category, by_context
from modelopt_eagle.report.page import by_depth, examples
from tests.report.runs import HOSTILE, make_acceptance, make_dialogues, make_history, make_run

VOID = {"meta", "link", "br"}


class Outline(HTMLParser):
    """Checks that elements are closed in order, and keeps what stands where."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text, self.headings = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if self.open and self.open[-1] in ("h2", "h3", "figcaption"):
            self.headings.append(data.strip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "<b>first</b>", overrides=["data.train_path=a&b<i>.jsonl"])


@pytest.fixture(scope="module")
def page(folder):
    assert run_command("report", [str(folder)]) == 0
    return (folder / "report" / "index.html").read_text(encoding="utf-8")


def test_every_part_of_a_run_is_on_its_page(page, folder):
    outline = Outline(page)
    wanted = {
        "Training", "Acceptance", "Cost", "Examples", "Data", "Recipe", "Environment", "By category", "By position",
        "By context length", "Loss by rollout step", "Accuracy by rollout step", "Acceptance length at each evaluation",
        "Learning rate", "Gradient norm", "Tokens a second", "Waiting for features", "What a step costs",
    }  # fmt: skip
    assert wanted <= set(outline.headings)
    text = re.sub(r"\s+", " ", "".join(outline.text))
    acceptance = json.loads((folder / "report" / "acceptance.json").read_text())
    low, high = acceptance["ci95"]
    for part in (
        f"{acceptance['acceptance_length']:.3f}", f"interval {low:.3f} to {high:.3f}", "1.40×", "2 cores",
        "chain of 3 drafted tokens", "0123456789ab with changes", "The machine was busy", "40 optimiser steps in 81 s",
        "no turns under `messages` or `conversations`", "4000 (44.4 %)", "10, 70, 200", "training.seed", "override",
    ):  # fmt: skip
        assert part in text, part
    for row in by_category(read_run(folder)):
        assert f"{row.value:.3f}" in text and row.prompts > 0
    assert page.count("<svg") == len(list((folder / "report").glob("*.png"))) == 12
    for picture in (folder / "report").glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_runs_nothing_fetches_nothing_and_escapes_what_is_not_ours(page):
    outline = Outline(page)
    names = {tag for tag, _ in outline.elements}
    assert not names & {"script", "iframe", "object", "img", "i", "b"}
    for tag, attributes in outline.elements:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert "url(http" not in page and "@import" not in page and "\x00" not in page
    assert "default-src 'none'" in page and 'name="viewport"' in page
    for part in (
        "<script>alert('x')</script>",
        "$x^2$",
        "{{ 7 * 7 }}",
        "a&b<i>.jsonl",
        "two <i>cores</i>",
        "<b>first</b>",
    ):
        assert part in "".join(outline.text), part  # as text, whole


def test_plots_take_the_pages_colours_and_are_named(page):
    found = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    for svg in found:
        assert 'class="plot"' in svg and 'viewBox="0 0' in svg and "width=" not in svg[:120]
        assert re.search(r'aria-label="[^"]{20,}"', svg)
        for color in (plots.INK, plots.MUTED, plots.LINE):
            assert color not in svg
        ElementTree.fromstring(svg.replace("xlink:href", "href"))
    labels = re.findall(r'id="([^"]+)"', page)
    assert len(labels) == len(set(labels)), "ids of two plots collide"


def test_examples_colour_what_was_accepted():
    dialogues = make_dialogues(4, categories=("a", "b"))
    shown = examples(dialogues)
    assert [entry["category"] for entry in shown] == ["a", "b", "a", "b"]
    first, turn = shown[0], dialogues[0]["turns"][0]
    assert "".join(piece["accepted"] + piece["own"] for piece in first["pieces"]) == "".join(
        map("".join, turn["pieces"])
    )
    assert [piece["count"] for piece in first["pieces"]] == [None, *turn["accepted"]]
    assert all(bool(piece["accepted"]) == bool(piece["count"]) for piece in first["pieces"])


def test_context_lengths_count_every_step_once():
    dialogues = make_dialogues(6)
    bins = by_context(dialogues)
    assert sum(entry.steps for entry in bins) == sum(len(row["turns"][0]["accepted"]) for row in dialogues)
    assert [entry.label for entry in bins][:2] == ["0 to 63", "64 to 127"]
    one = {"id": "x", "category": "c", "turns": [{"question": "", "context": 62, "pieces": [], "accepted": [2, 0, 1]}]}
    assert [(entry.label, entry.steps, entry.value) for entry in by_context([one])] == [
        ("0 to 63", 1, 3.0), ("64 to 127", 2, 1.5),
    ]  # fmt: skip


@pytest.mark.parametrize("values, axis", [([0, 0, 0], (0, 1)), ([0.0, 2.0], (0, 2.2)), ([], (0, 1))])
def test_no_axis_is_negative_where_no_value_is(values, axis):
    assert plots.span(values) == pytest.approx(axis)
    assert plots.span([1.0, 1.0], base=1.0) == pytest.approx((1, 2)) and plots.span([0.3], top=1.0) == (0, 1.0)
    low, high = plots.span([-2.0, 3.0])
    assert low < -2 and high > 3


def test_a_head_that_accepts_nothing_has_a_page(tmp_path):
    dialogues = make_dialogues(3, rate=0.0)
    folder = make_run(
        tmp_path / "zero", dialogues=dialogues, acceptance=make_acceptance(dialogues, speedup=None, costs=None)
    )
    page = write_page(read_run(folder), tmp_path / "out").read_text()
    assert "1.000" in page and "speed-up not measured" in page
    assert "−" not in "".join(Outline(page).text), "a negative tick"


def test_a_category_without_a_step_is_named(tmp_path):
    dialogues = make_dialogues(4, categories=("a",))
    acceptance = make_acceptance(dialogues)
    acceptance["per_category"]["stem"] = None
    folder = make_run(tmp_path / "run", dialogues=dialogues, acceptance=acceptance)
    text = "".join(Outline(write_page(read_run(folder), tmp_path / "out").read_text()).text)
    assert re.search(r"stem\s*–\s*0\s*none", text) or "stem–0none–" in text


def test_a_sweep_and_a_tree_are_shown(tmp_path):
    dialogues = make_dialogues(4)
    tree = {"mode": "tree", "topk": 2, "depth": 3, "num_nodes": 7}
    rows = [
        {**shape, "acceptance_length": 2.5, "speedup": speedup, "break_even": 1.4, "processor_share": 1.8}
        for shape, speedup in ((tree, 1.5), ({"mode": "chain", "num_steps": 3}, 1.2))
    ]
    folder = make_run(
        tmp_path / "tree", dialogues=dialogues, acceptance=make_acceptance(dialogues, draft=tree, sweep=rows, best=tree)
    )
    outline = Outline(write_page(read_run(folder), tmp_path / "out").read_text())
    assert {"Draft shapes on this machine", "By depth"} <= set(outline.headings)
    assert "Best on this machine: tree, topk 2, depth 3, num_nodes 7, 1.50x" in "".join(outline.text)


@pytest.mark.parametrize("missing", ["acceptance.json", "dialogues.jsonl", "data.json", "environment.json"])
def test_a_part_that_is_missing_is_said(missing, tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    next(folder.rglob(missing)).unlink()
    text = re.sub(r"\s+", " ", "".join(Outline(write_page(read_run(folder), tmp_path / "out").read_text()).text))
    said = {
        "acceptance.json": "acceptance walk at step 40; not measured by decoding yet",
        "dialogues.jsonl": "By category",
        "data.json": "data: 120 conversations read",
        "environment.json": "Not recorded here",
    }
    assert said[missing] in text and "not finished" in text


def test_what_is_no_run_or_damaged_is_refused(tmp_path, capsys):
    assert run_command("report", [str(tmp_path)]) == 2
    assert "holds no run: expected checkpoint-*/trainer_state.json" in capsys.readouterr().err
    for arguments, says in (([], "expected the output folder of one run, found 0"), (["a", "b"], "--compare")):
        assert run_command("report", arguments) == 2
        assert says in capsys.readouterr().err
    folder = make_run(tmp_path / "run")
    (folder / "report" / "acceptance.json").write_text('{"acceptance_length": ')
    with pytest.raises(CheckpointError, match=r"acceptance\.json is damaged"):
        read_run(folder)
    (folder / "report" / "acceptance.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object, found list"):
        read_run(folder)


@pytest.mark.parametrize(
    "name, lost",
    [
        ("report/acceptance.json", "ci95"),
        ("data.json", "dropped"),
        ("checkpoint-40/trainer_state.json", "history"),
        ("report/dialogues.jsonl", "category"),
        ("report/dialogues.jsonl", "pieces"),
    ],
)
def test_a_file_that_lost_a_value_is_named_with_the_value(name, lost, tmp_path):
    folder = make_run(tmp_path / "run")
    text = (folder / name).read_text()
    assert f'"{lost}"' in text and read_run(folder).acceptance
    (folder / name).write_text(text.replace(f'"{lost}"', '"other"'))
    with pytest.raises(CheckpointError, match=rf"{name} is damaged \(it holds no {lost}\): remove it, and"):
        read_run(folder)


def test_a_recipe_of_another_release_is_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "recipe.yaml").write_text("training:\n  epochz: 3\n")
    assert read_run(folder).recipe is None
    assert "written by another release" in write_page(read_run(folder), tmp_path / "out").read_text()


def test_runs_are_compared_by_prompt(tmp_path, capsys):
    first = make_run(tmp_path / "first", rate=0.4)
    better = make_run(tmp_path / "better", rate=0.7, seed=1, overrides=["training.learning_rate=1e-3"])
    same = make_run(tmp_path / "again" / "first", rate=0.4)
    output = tmp_path / "compared.html"
    assert run_command("report", ["--compare", str(first), str(better), str(same), "--output", str(output)]) == 0
    printed, outline = capsys.readouterr().out, Outline(output.read_text())
    text = re.sub(r"\s+", " ", "".join(outline.text))
    assert "again/first" in printed and ": better" in printed and "p = 1: no difference shown" in printed
    for part in (": better (16 prompts)", "no difference shown", "training.learning_rate"):
        assert part in text
    assert {"Acceptance length by category", "Loss", "Acceptance length at each evaluation"} <= set(outline.headings)
    assert "training.output_dir" not in text


def test_what_makes_a_comparison_doubtful_is_noted(tmp_path):
    first = make_run(tmp_path / "first")
    rows = make_dialogues(10, rate=0.5)
    other = make_acceptance(rows, target="another", draft={"mode": "chain", "num_steps": 5})
    second = make_run(tmp_path / "second", dialogues=rows, acceptance=other)
    _, table = write_comparison([first, second], tmp_path / "page.html")
    for note in ("chain of 3 drafted tokens, ", "chain of 5", "over another", "10 of 16 prompts are in both"):
        assert note in table
    third = make_run(tmp_path / "third", dialogues=[{**row, "id": f"q{row['id']}"} for row in rows])
    with pytest.raises(CheckpointError, match="measured on other prompts: none is in both"):
        write_comparison([first, third], tmp_path / "page.html")
    with pytest.raises(CheckpointError, match="two runs at least, found 1"):
        write_comparison([first], tmp_path / "page.html")
    (second / "report" / "dialogues.jsonl").unlink()
    assert "not compared by prompt" in write_comparison([first, second], tmp_path / "page.html")[1]


def test_names_at_an_axis_are_one_short_line():
    assert plots.short("a\nb\x00" + "c" * 40) == "a b " + "c" * 21 + "…"
    assert len(plots.short(HOSTILE)) <= plots.LABEL_LENGTH


def test_a_measurement_of_an_earlier_head_is_called_one(tmp_path, capsys):
    from modelopt_eagle.cli import report
    from modelopt_eagle.common.files import file_sha256

    run = make_run(tmp_path / "run")
    weights = run / "best" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"measured")
    (run / "report" / "measured.json").write_text(json.dumps({"weights": file_sha256(weights)}))
    assert report.main([str(run)]) == 0
    assert "earlier head" not in capsys.readouterr().out + (run / "report" / "index.html").read_text()
    weights.write_bytes(b"trained further")
    assert report.main([str(run)]) == 0
    assert "note: the acceptance was measured on an earlier head" in capsys.readouterr().out
    assert (
        "Note:</strong> the acceptance was measured on an earlier head" in (run / "report" / "index.html").read_text()
    )
    (run / "report" / "measured.json").write_text("[")
    assert not read_run(run).outdated


def test_notes_of_a_measurement_are_on_the_page(tmp_path):
    rows = make_dialogues()
    run = make_run(tmp_path / "run", acceptance=make_acceptance(rows, notes=["2 of <b> prompts were not asked"]))
    page = write_page(read_run(run), run / "report").read_text()
    assert "2 of &lt;b&gt; prompts were not asked" in page


def test_a_step_that_was_not_trained_has_no_loss():
    history = make_history()
    for entry in history[:5]:
        entry["per_step"][1:] = entry["accuracy"][1:] = [0.0, 0.0]
    for key in ("per_step", "accuracy"):
        first, *later = by_depth(history, key)
        assert len(first.x) == len(history)
        assert all(len(curve.x) == len(history) - 5 and curve.x[0] == history[5]["step"] for curve in later)
