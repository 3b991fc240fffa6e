"""Uploading, against a hub that runs here for the length of a test."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from modelopt_eagle.cli.main import run_command
from modelopt_eagle.errors import ExportError
from modelopt_eagle.export import export_checkpoint, load_draft
from modelopt_eagle.export.hub import push_to_hub


class Hub(BaseHTTPRequestHandler):
    """Takes one repository's files into ``server.files``; every path it was asked for is in ``server.asked``."""

    def log_message(self, *arguments):
        pass

    def answer(self, data, status=200):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append(self.path)
        self.answer({"id": "me/head", "modelId": "me/head", "sha": "0" * 40, "siblings": [], "tags": []})

    do_HEAD = do_GET

    def do_POST(self):
        self.server.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refuse and "/repos/create" not in self.path:
            self.answer({"error": "You are not allowed"}, 403)
        elif self.path.endswith("/repos/create"):
            self.answer({"url": f"{self.server.address}/me/head"})
        elif self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer(
                {"commitUrl": f"{self.server.address}/me/head/commit/1", "commitOid": "1" * 40, "success": True}
            )
        else:
            self.answer({"error": f"unexpected {self.path}"}, 404)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.asked, server.refuse = {}, [], False
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
    yield server
    server.shutdown()
    server.server_close()


def test_a_folder_arrives_whole(tmp_path, head, hub):
    export_checkpoint(head, None, tmp_path / "out")
    assert hub.asked == []  # an export by itself uploads nothing
    assert push_to_hub(tmp_path / "out", "me/head", endpoint=hub.address).endswith("/me/head/commit/1")
    assert set(hub.files) == {"config.json", "README.md", "model.safetensors"}
    (tmp_path / "back").mkdir()
    for name, content in hub.files.items():
        (tmp_path / "back" / name).write_bytes(content)
    assert torch.equal(load_draft(tmp_path / "back").fc.weight, head.fc.weight)


def test_refusals_name_the_reason_and_leave_the_folder(tmp_path, head, hub):
    export_checkpoint(head, None, tmp_path / "out")
    with pytest.raises(ExportError, match="owner/name"):
        push_to_hub(tmp_path / "out", "head", endpoint=hub.address)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/secret.txt").write_text("x")
    with pytest.raises(ExportError, match="is no export"):
        push_to_hub(tmp_path / "mine", "me/head", endpoint=hub.address)
    hub.refuse = True
    with pytest.raises(ExportError, match="403.*stays"):
        push_to_hub(tmp_path / "out", "me/head", endpoint=hub.address)
    assert hub.files == {} and load_draft(tmp_path / "out").config == head.config


def test_the_export_command_uploads_only_when_asked(tmp_path, head, hub, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)  # as HF_ENDPOINT does at the start
    export_checkpoint(head, None, tmp_path / "head")
    given = ["--model_path", str(tmp_path / "head"), "--export_path", str(tmp_path / "out")]
    assert run_command("export_hf_checkpoint", given) == 0 and hub.asked == []
    again = [*given, "--overwrite", "--push_to_hub", "me/head"]
    assert run_command("export_hf_checkpoint", again) == 0
    assert f"uploaded  {hub.address}/me/head/commit/1" in capsys.readouterr().out
    assert set(hub.files) == {"config.json", "README.md", "model.safetensors"}
    hub.refuse = True
    assert run_command("export_hf_checkpoint", again) == 2
    assert "hf auth login" in capsys.readouterr().err and load_draft(tmp_path / "out").config == head.config
