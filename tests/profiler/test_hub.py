"""Against a hub of our own on this machine, asked in a process of its own: the hub library reads its settings once."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from profiler import hub, model_files, models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


class Handler(BaseHTTPRequestHandler):
    """The few addresses of the hub's interface that a download needs."""

    repositories: dict[str, dict[str, bytes]]
    asked: list[str]
    lost: str

    def log_message(self, *args):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self.tell(path.removeprefix("/api/models/"))
        elif path.startswith("/api/"):
            self.answer(404, b"")
        else:
            name, _, rest = path.lstrip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            self.asked.append(file)
            if file == self.lost:
                self.close_connection = True
                return
            body = self.repositories[name][file]
            assert revision in (COMMIT, "main", "v1")
            digest = hashlib.sha256(body).hexdigest()
            self.answer(200, body, ETag=f'"{digest}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    do_HEAD = do_GET

    def tell(self, asked):
        name, _, revision = asked.partition("/revision/")
        if name == "org/gated":
            self.answer(403, b"", X_Error_Code="GatedRepo")
        elif name not in self.repositories:
            self.answer(404, b"", X_Error_Code="RepoNotFound")
        elif revision not in ("", "main", "v1", COMMIT):
            self.answer(404, b"", X_Error_Code="RevisionNotFound")
        else:
            siblings = [{"rfilename": file} for file in self.repositories[name]]
            body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.answer(200, json.dumps(body).encode(), Content_Type="application/json")


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    tiny = models.load("tiny", device="cpu")
    with model_files.quiet():
        tiny.model.save_pretrained(folder, max_shard_size="700KB")
    tiny.tokenizer.save_pretrained(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert "model.safetensors.index.json" in files
    extra = {"pytorch_model.bin": b"pickle", "original/big.safetensors": b"x", "other.safetensors": b"x"}
    return {"org/good": files | extra, "org/pickles": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}


@pytest.fixture
def server(repositories):
    Handler.repositories, Handler.asked, Handler.lost = repositories, [], ""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(tmp_path, endpoint, code, **environment):
    """What `code` prints, or the InputError it ended with, run against the hub at `endpoint`."""
    program = f"""
from profiler import hub, models
from profiler.errors import InputError
try:
    {code}
except InputError as error:
    print("InputError:", error)
"""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    kept |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=kept | environment,
        cwd=tmp_path,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SNAPSHOT = "s = hub.snapshot('org/good', weights=True); print(s.folder); print(s.revision)"


def test_a_repository_is_downloaded_at_its_commit_and_found_again_offline(server, tmp_path, repositories, monkeypatch):
    printed = ask(tmp_path, server, SNAPSHOT)
    folder, revision = printed.splitlines()
    assert revision == COMMIT
    wanted = {file for file in repositories["org/good"] if "/" not in file}
    assert set(Handler.asked) == wanted - {"pytorch_model.bin", "other.safetensors"}
    assert {path.name: path.read_bytes() for path in Path(folder).iterdir()} == {
        file: repositories["org/good"][file] for file in Handler.asked
    }
    assert ask(tmp_path, "http://127.0.0.1:9", SNAPSHOT) == printed
    assert ask(tmp_path, server, SNAPSHOT, HF_HUB_OFFLINE="1") == printed

    monkeypatch.setattr(hub, "snapshot", lambda source, weights: hub.Snapshot(Path(folder), revision))
    loaded = models.load("org/good", device="cpu")
    assert loaded.record.model_dump()["revision"] == COMMIT
    assert (loaded.record.parameters, loaded.record.random_weights) == (312_320, False)
    assert loaded.tokenizer("ab").input_ids == [97, 98]


def test_a_config_needs_no_weights(server, tmp_path):
    assert ask(tmp_path, server, "print(hub.snapshot('org/good@v1', weights=False).revision)") == COMMIT
    assert "config.json" in Handler.asked
    assert not [file for file in Handler.asked if file.endswith(".safetensors")]


def test_a_download_cut_short_is_not_taken_for_the_model(server, tmp_path, repositories):
    Handler.lost = max(file for file in repositories["org/good"] if file.startswith("model-"))
    printed = ask(tmp_path, server, SNAPSHOT)
    assert "the hub cannot be used (" in printed
    assert "the model is only partly in its cache" in printed
    assert "only partly in its cache" in ask(tmp_path, "http://127.0.0.1:9", SNAPSHOT)
    Handler.lost = ""
    assert ask(tmp_path, server, SNAPSHOT).endswith(COMMIT)


def test_fetch_says_where_and_which(server, tmp_path):
    printed = ask(tmp_path, server, "models.fetch('org/good', print)")
    assert printed.endswith(f"/snapshots/{COMMIT}, commit {COMMIT}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("org/none", "no such folder here, and the hub has no model org/none"),
        ("org/gated", "lets only approved accounts download it"),
        ("org/good@v9", "the hub's org/good has no revision 'v9'"),
        ("org/pickles", "has no model.safetensors and only pickles (pytorch_model.bin), which run code when read"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(server, tmp_path, source, said):
    printed = ask(tmp_path, server, f"hub.snapshot({source!r}, weights=True)")
    assert printed.startswith(f"InputError: model source {source.partition('@')[0]}")
    assert said in printed
    assert not [file for file in Handler.asked if not file.endswith(".json")]


def test_no_network_is_a_sentence(tmp_path):
    printed = ask(tmp_path, "http://127.0.0.1:9", "hub.snapshot('org/good', weights=True)")
    assert printed.startswith("InputError: model source org/good: no such folder here, the hub cannot be used (")
    assert "Connection refused" in printed
    assert "\n" not in printed
    offline = ask(tmp_path, "http://127.0.0.1:9", "hub.snapshot('org/good', weights=True)", HF_HUB_OFFLINE="1")
    assert "offline mode is enabled" in offline
