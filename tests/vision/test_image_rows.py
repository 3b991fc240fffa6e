"""Rows with images: tokens and mask, states as the target's own forward gives them, training, stores, refusals."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from modelopt_eagle.data import load_prompts, prepare_dataset, read_conversations
from modelopt_eagle.data.images import read_pictures
from modelopt_eagle.errors import DataError, EagleError, FeatureError, TargetError
from modelopt_eagle.features import FeatureContract, MemorySource, OfflineSource, OnlineSource, collate
from modelopt_eagle.features.compute import compute_features, compute_rows
from modelopt_eagle.features.dump import EngineBackEnd, TargetBackEnd, dump
from modelopt_eagle.features.store import dataset_hash
from modelopt_eagle.target import load_target
from modelopt_eagle.target.lora import TargetAdapter
from modelopt_eagle.target.tiny import make_byte_tokenizer
from tests.vision.conftest import pictured, text
from tests.vision.tiny_vision import LISTS_ONLY, TAGGED, draw, make_step, make_tokenizer

AUX = (0, 1, 6)
ANSWERS = [["a red one"], ["good day", "well"], ["the first is green"], ["tell me", "a wide one"]]


def read(target, path, **options):
    return prepare_dataset(target.tokenizer, path, vision=target.vision, **options)


def learned(tokenizer, row):
    """The supervised runs of a row, as text."""
    runs = [[]]
    for token, flag in zip(row.input_ids, row.supervised, strict=True):
        if flag:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def forward_inputs(target, row):
    """What the processor's own call makes of a row: every tensor, ids included."""
    output = target.vision.processor(
        text=[row.images.text], images=row.images.read(), return_tensors="pt", add_special_tokens=False
    )
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def own_states(target, inputs):
    """Inputs of the layers after those of ``AUX``, and logits, of the model's own forward."""
    layers, seen = target.layers, {}

    def keep(number):
        def hook(module, arguments, named):
            seen[number] = (arguments[0] if arguments else named["hidden_states"]).clone()

        return hook

    handles = [layers[k + 1].register_forward_pre_hook(keep(k), with_kwargs=True) for k in AUX]
    try:
        output = target.model(**inputs, use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([seen[k] for k in AUX], -1), output.logits, output.hidden_states


def test_tokens_are_the_processors_own_and_answers_alone_are_learned(target, mixed):
    dataset = read(target, mixed)
    assert not dataset.report.dropped and [row.images is None for row in dataset.rows] == [False, True, False, False]
    for row, answers in zip(dataset.rows, ANSWERS, strict=True):
        assert learned(target.tokenizer, row) == [f"{answer}<|im_end|>" for answer in answers]
        if row.images is None:
            continue
        messages = read_conversations(mixed).rows[dataset.rows.index(row)].messages
        conversation = [
            {"role": m.role, "content": [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "path": part.path}
                for part in m.parts or (m.content,)
            ]}
            for m in messages
        ]  # fmt: skip
        served = target.vision.processor.apply_chat_template(
            conversation, chat_template=target.tokenizer.chat_template, tokenize=True, return_dict=True
        )
        assert row.input_ids == list(torch.as_tensor(served["input_ids"]).flatten())
        places = [i for i, token in enumerate(row.input_ids) if token in target.vision.image_token_ids]
        assert len(places) > len(row.images.paths) and not any(row.supervised[i] for i in places)
        assert row.images.end == places[-1] + 1


def test_states_are_those_of_the_targets_own_forward(target, mixed):
    rows = read(target, mixed).rows
    made = compute_features(target, rows, AUX)
    for row, features in zip(rows, made, strict=True):
        inputs = {"input_ids": torch.tensor([row.input_ids])} if row.images is None else forward_inputs(target, row)
        aux, logits, _ = own_states(target, inputs)
        assert features.input_ids.tolist() == inputs["input_ids"][0].tolist()
        torch.testing.assert_close(features.aux_hidden, aux[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(target.logits(features.final_hidden), logits[0], rtol=1e-4, atol=1e-4)
        wanted = torch.nn.functional.pad(features.supervised[1:], (0, 1))
        assert torch.equal(features.target_top1[wanted], logits[0].argmax(-1)[wanted])


def test_captures_stand_behind_what_the_model_adds_between_layers(targets, mixed):
    """Qwen3-VL adds image features after its first layers: they are part of the state, as in vLLM; LLaVA adds none."""
    for family, behind in (("qwen3_vl", True), ("llava", False)):
        target = targets[family]
        row = read(target, mixed).rows[0]
        inputs = forward_inputs(target, row)
        with target.capture((1,)) as captured:
            (features,) = compute_features(target, [row], (1,))
        pictures = torch.isin(inputs["input_ids"][0], torch.tensor(sorted(target.vision.image_token_ids)))
        same = torch.isclose(features.aux_hidden, captured.aux_hidden[0], atol=1e-6).all(-1)
        assert same[~pictures].all() and same[pictures].all() != behind


def test_pictures_matter_and_texts_are_left_as_they_were(target, mixed, tmp_path):
    rows = read(target, mixed).rows
    before = compute_features(target, [rows[1]], AUX)[0]
    with_picture = compute_features(target, [rows[0]], AUX)[0]
    after = compute_features(target, [rows[1]], AUX)[0]
    assert torch.equal(before.aux_hidden, after.aux_hidden)
    target.check_parity(torch.randint(4, 247, (1, 9)))
    for name in ("red.png", "green.png", "wide.png"):
        shutil.copy(mixed.parent / name, tmp_path / name)
    draw(tmp_path / "red.png", 60, 40, (9, 8, 7))
    other = read(target, shutil.copy(mixed, tmp_path / "mixed.jsonl")).rows
    assert other[0].input_ids == rows[0].input_ids and dataset_hash(other) != dataset_hash(rows)
    changed = compute_features(target, [other[0]], AUX)[0]
    answer = changed.supervised
    assert not torch.allclose(changed.aux_hidden[answer], with_picture.aux_hidden[answer], atol=1e-3)


def test_loss_falls_on_rows_with_images(target, mixed):
    rows = [row for row in read(target, mixed).rows if row.images is not None]
    aux = target.default_aux_layer_ids()
    batch = collate(compute_features(target, rows, aux), FeatureContract.from_target(target, aux))
    step = make_step(target)
    optimizer, outputs = torch.optim.Adam(step.parameters(), 1e-2), []
    counts = step.count_positions(batch)
    for _ in range(60):
        outputs.append(step(batch, step.normalisers(counts, batch.num_tokens)))
        optimizer.zero_grad()
        outputs[-1].loss.backward()
        optimizer.step()
    first, last = outputs[0], outputs[-1]
    assert int(counts[0]) > 20 and float(last.loss) < float(first.loss) - 1
    assert int(last.top1_hits[0]) > int(first.top1_hits[0]) + 10


def test_every_source_gives_the_same_states(target, mixed, tmp_path):
    rows = read(target, mixed).rows
    dump(TargetBackEnd(target, AUX), rows, tmp_path, dtype="float32")
    sources = [OnlineSource(target, rows, AUX), MemorySource.from_target(target, rows, AUX), OfflineSource(tmp_path)]
    online, memory, stored = (source.load([2, 0, 1, 3]) for source in sources)
    for batch in (memory, stored):
        assert torch.equal(batch.input_ids, online.input_ids) and torch.equal(batch.supervised, online.supervised)
        torch.testing.assert_close(batch.aux_hidden, online.aux_hidden, rtol=1e-4, atol=1e-4)
        assert torch.equal(batch.target_top1, online.target_top1)


def test_rows_that_begin_alike_with_other_pictures_share_nothing(target, mixed, tmp_path):
    lines = [json.loads(line) for line in mixed.read_text().splitlines()]
    for name in ("red.png", "green.png", "wide.png"):
        shutil.copy(mixed.parent / name, tmp_path / name)
    draw(tmp_path / "blue.png", 60, 40, (0, 0, 255))
    row = lines[0]
    other = json.loads(json.dumps(row).replace("red.png", "blue.png")) | {"id": "other"}
    path = tmp_path / "alike.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (row, other, row | {"id": "again"})))
    rows = read(target, path).rows
    assert rows[0].input_ids == rows[1].input_ids
    dump(TargetBackEnd(target, AUX), rows, tmp_path / "store", dtype="float32")
    stored = OfflineSource(tmp_path / "store")
    alone = dict(compute_rows(target, rows, AUX))
    for number in range(3):
        features = stored.load([number])
        torch.testing.assert_close(features.aux_hidden[0], alone[number].aux_hidden, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(alone[0].aux_hidden, alone[1].aux_hidden, atol=1e-2)


def test_a_window_may_end_behind_the_last_picture_only(targets, mixed):
    target = targets["qwen2_5_vl"]
    whole = read(target, mixed).rows[0]
    cut = read(target, mixed, max_length=len(whole.input_ids) - 3)
    assert cut.rows[0].input_ids == whole.input_ids[:-3]
    long, short = (compute_features(target, [row], AUX)[0] for row in (whole, cut.rows[0]))
    torch.testing.assert_close(short.aux_hidden, long.aux_hidden[:-3], rtol=1e-4, atol=1e-4)
    late = read(target, mixed).rows[3]  # its picture stands behind the first answer
    assert any(late.supervised[: late.images.end])
    report = read(target, mixed, max_length=late.images.end - 1).report
    assert report.dropped == {"image_past_window": 1} and "its last image ends at" in report.header()


def test_generation_tags_narrow_answers_behind_pictures(targets, mixed):
    target = targets["llava"]
    tokenizer = make_tokenizer(TAGGED)
    dataset = prepare_dataset(tokenizer, mixed, vision=target.vision)
    wanted = [f"{answers[-1][2:]}<|im_end|>" for answers in ANSWERS]
    assert [learned(tokenizer, row)[-1] for row in dataset.rows] == wanted


def write(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_layouts_of_other_tools(targets, tmp_path):
    """LLaVA's ``<image>`` marks, an image beside the turns, empty image parts, OpenAI's parts: the same row."""
    target = targets["qwen2_5_vl"]
    name, more = draw(tmp_path / "a.png", 60, 40, (1, 2, 3)), draw(tmp_path / "b.png", 30, 30, (9, 2, 3))
    answer = {"role": "assistant", "content": "yes"}
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]}
    openai = {"type": "image_url", "image_url": {"url": f"file://{tmp_path / name}"}}
    path = write(
        tmp_path,
        pictured([name, "see"], "yes"),
        {"image": name, "conversations": [{"from": "human", "value": "<image>see"}, {"from": "gpt", "value": "yes"}]},
        {"image": name, "conversations": [{"from": "human", "value": "see"}, {"from": "gpt", "value": "yes"}]},
        {"images": [name], "messages": [turn, answer]},
        {"messages": [{"role": "user", "content": [openai, {"type": "text", "text": "see"}]}, answer]},
        {"images": [more, name], "messages": [{"role": "user", "content": "a<image>b<image>c"}, answer]},
    )
    dataset = read(target, path)
    assert not dataset.report.dropped
    assert all(row.input_ids == dataset.rows[0].input_ids for row in dataset.rows[:5])
    assert [p.rsplit("/", 1)[-1] for p in dataset.rows[5].images.paths] == [more, name]
    shown = target.tokenizer.decode([i for i in dataset.rows[5].input_ids if i not in target.vision.image_token_ids])
    assert "user\na<|vision_start|><|vision_end|>b<|vision_start|><|vision_end|>c" in shown


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        (pictured(["gone.png", "what?"], "a"), "image_missing", "no image file"),
        (pictured(["https://host/a.png", "what?"], "a"), "image_not_local", "https://host/a.png"),
        (pictured(["broken.png", "what?"], "a"), "image_unreadable", "not an image"),
        ({"images": ["a.png", "a.png"], **text("<image>b", "a")}, "image_count", "1 places for images, 2"),
        (pictured(["a.png", "what? <|image_pad|>"], "a"), "image_not_rendered", "2 placeholders .* for 1 images"),
        (pictured(["a.png", "what?"], "<|image_pad|>"), "image_not_rendered", "2 placeholders"),
        (pictured("what?", ["a.png", "a"]), "image_in_answer", "turn 1"),
        (pictured(["flat.png", "what?"], "a"), "image_refused", "refused its images"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}, "non_text_content", ""),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_rows_that_cannot_be_used_are_counted(targets, tmp_path, row, reason, words):
    draw(tmp_path / "a.png", 60, 40, (1, 2, 3))
    draw(tmp_path / "flat.png", 900, 2, (1, 2, 3))  # Qwen's processor takes no side 200 times the other
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:120])
    dataset = read(targets["qwen2_5_vl"], write(tmp_path, text("hi", "hello"), row))
    assert dataset.report.dropped == {reason: 1} and len(dataset.rows) == 1
    assert re.search(words, dataset.report.examples[reason]) and "rows.jsonl:2" in dataset.report.examples[reason]


def test_a_target_of_text_drops_rows_with_images(tiny_target, mixed):
    dataset = read(tiny_target, mixed)
    assert tiny_target.vision is None and dataset.report.dropped == {"image_without_processor": 3}
    with pytest.raises(DataError, match="nothing to train on: .*the target reads none"):
        prepare_dataset(make_byte_tokenizer(), write_only_pictured(mixed))


def write_only_pictured(mixed):
    path = mixed.parent / "only.jsonl"
    path.write_text(mixed.read_text().splitlines()[0] + "\n")
    return path


def test_a_template_without_images_is_noticed(targets, mixed):
    tokenizer = make_tokenizer(LISTS_ONLY.replace("<pic>", ""))
    dataset = prepare_dataset(tokenizer, mixed, vision=targets["llava"].vision)
    assert dataset.report.dropped == {"image_not_rendered": 3}


def test_a_target_without_processor_files_says_so(folders, mixed, tmp_path):
    for family in ("llava", "qwen3_vl"):
        folder = shutil.copytree(folders[family], tmp_path / family)
        for name in ("processor_config.json", "preprocessor_config.json"):
            (folder / name).unlink(missing_ok=True)
        target = load_target(folder)
        with pytest.raises(TargetError, match="rows with images need the target's processor"):
            read(target, mixed)
        assert len(prepare_dataset(target.tokenizer, mixed).rows) == 1


def test_a_processor_that_makes_other_tokens_now_is_noticed(targets, mixed):
    target = targets["llava"]
    row = next(row for row in read(target, mixed).rows if row.images is not None)
    other = replace(row, input_ids=[*row.input_ids[:-1], row.input_ids[-1] - 1])
    with pytest.raises(FeatureError, match="makes other tokens of it now"):
        compute_features(target, [other], AUX)


def test_a_changed_or_lost_picture_is_not_trained_on(targets, mixed, tmp_path):
    target = targets["llava"]
    for name in ("red.png", "green.png", "wide.png"):
        shutil.copy(mixed.parent / name, tmp_path / name)
    rows = read(target, shutil.copy(mixed, tmp_path / "mixed.jsonl")).rows
    draw(tmp_path / "red.png", 60, 40, (0, 0, 0))
    with pytest.raises(DataError, match="red.png: an image has changed"):
        compute_features(target, [rows[0]], AUX)
    (tmp_path / "red.png").unlink()
    with pytest.raises(DataError, match="red.png: the image cannot be opened"):
        compute_features(target, [rows[0]], AUX)


def test_what_reads_text_only_refuses_rows_with_images(targets, tiny_target, mixed):
    target = targets["llava"]
    rows = read(target, mixed).rows
    with pytest.raises(FeatureError, match="row 'row-0' has images, and this back end reads text only"):
        list(EngineBackEnd(target, AUX, lambda rows: iter(()), final_is_normed=True).features(rows))
    with pytest.raises(FeatureError, match="row 'row-0' has images, and .* reads text only"):
        compute_features(tiny_target, [rows[0]], AUX)
    with pytest.raises(EagleError, match=r"mixed.jsonl:1: prompts with images are not supported here"):
        load_prompts(mixed)


def test_transparent_pictures_stand_on_white_and_turned_ones_are_set_upright(tmp_path):
    from PIL import Image

    clear = Image.new("RGBA", (4, 2), (200, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    turned = Image.new("RGB", (4, 2), (0, 90, 0))
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(tmp_path / "turned.jpg", exif=exif)
    (one, two), _ = read_pictures((str(tmp_path / "clear.png"), str(tmp_path / "turned.jpg")))
    assert one.getpixel((0, 0)) == (255, 255, 255) and one.mode == "RGB"
    assert two.size == (2, 4)


def test_a_gradient_reaches_adapters_of_the_target_through_rows_with_images(folders, mixed):
    target = load_target(folders["qwen3_vl"])
    rows = read(target, mixed).rows[:1]
    plain = compute_features(target, rows, AUX)[0]
    adapter = TargetAdapter(target, rank=2, alpha=4, target_modules=["q_proj", "v_proj"], first_layer=0)
    made = compute_features(target, rows, AUX, gradient=True)[0]
    torch.testing.assert_close(made.aux_hidden, plain.aux_hidden)
    (made.aux_hidden.square().mean() + made.final_hidden.square().mean()).backward()
    late = [p for name, p in adapter.named.items() if "layers.7." in name and "lora_B" in name]
    assert late and all(p.grad.abs().sum() > 0 for p in late)
    assert all(p.grad is None for p in target.model.model.visual.parameters())
