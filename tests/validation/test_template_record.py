"""The chat template of training, remembered by the head."""

from types import SimpleNamespace

import pytest
from heads import make_head

from modelopt_eagle.cli.ar_validate import warn_of_another_template
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.recipe import load_recipe
from modelopt_eagle.target.tiny import make_tiny_target
from modelopt_eagle.training.head import new_head


@pytest.fixture(scope="module")
def head(target):
    recipe = load_recipe(None, ["eagle.draft_vocab_size=null"])
    data = SimpleNamespace(counts=0 * target.embedding.weight[:, 0].long(), train=SimpleNamespace(lengths=[7]))
    return new_head(recipe, target, data, target.default_aux_layer_ids())[0]


def test_another_template_is_said(target, head, tmp_path, capsys):
    """B142: also of an exported head; a head that records none is left alone."""
    export_checkpoint(head, None, tmp_path / "head")
    exported = load_draft(tmp_path / "head")
    warn_of_another_template(exported, target)
    assert capsys.readouterr().out == ""
    other = make_tiny_target()
    other.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    warn_of_another_template(exported, other)
    assert "another chat template" in capsys.readouterr().out
    warn_of_another_template(make_head(target), other)
    assert capsys.readouterr().out == ""
