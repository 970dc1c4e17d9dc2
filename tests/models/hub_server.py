"""A minimal hub server for push and download."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WRITER, READER = "hf_writer", "hf_reader"


class Hub:
    """Repositories in memory: each is a list of commits, each commit a dict of files."""

    def __init__(self):
        self.commits, self.private, self.requests = {}, set(), []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repo, files):
        self.commits.setdefault(repo, []).append(files)

    def files(self, repo):
        return self.commits[repo][-1]

    def sha(self, repo, number=-1):
        number %= len(self.commits[repo])
        return hashlib.sha1(f"{repo} {number}".encode()).hexdigest()

    def at(self, repo, revision):
        shas = {self.sha(repo, number): number for number in range(len(self.commits[repo]))}
        number = -1 if revision == "main" else shas.get(revision)
        return None if number is None else (self.sha(repo, number), self.commits[repo][number])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def do_GET(self):
        self._act()

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _answer(self, status, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
            headers["Content-Type"] = "application/json"
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reject(self, status, code, message):
        self._answer(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    def _act(self):
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", WRITER, READER):
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        writes = self.command == "POST" and "validate" not in path
        if writes and token != WRITER:
            return self._reject(403, "", "you need write access")
        for pattern, act in ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found is None:
                continue
            repo = found.groupdict().get("repo")
            if repo and (repo not in hub.commits or (repo in hub.private and not token)):
                return self._reject(401, "RepoNotFound", "Repository not found")
            return act(self, hub, body, **found.groupdict())
        return self._answer(404, {"error": f"{self.command} {path}"})

    def _nothing(self, hub, body):
        self._answer(200)

    def _create(self, hub, body):
        request = json.loads(body)
        repo = f"{request['organization']}/{request['name']}"
        url = {"url": f"{hub.address}/{repo}"}
        if repo in hub.commits:
            return self._answer(409, {"error": "You already created this model repo", **url})
        hub.commit(repo, {".gitattributes": b""})
        if request.get("private") or request.get("visibility") == "private":
            hub.private.add(repo)
        return self._answer(200, url)

    def _info(self, hub, body, repo):
        files = [{"rfilename": name} for name in hub.files(repo)]
        self._answer(200, {"id": repo, "sha": hub.sha(repo), "siblings": files, "private": False})

    def _validate(self, hub, body):
        if b"license: no-such" in body:
            return self._answer(400, {"errors": [{"message": '"license" is unknown'}]})
        return self._answer(200, {"errors": [], "warnings": []})

    def _preupload(self, hub, body, repo):
        mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        files = [{"path": file["path"], **mode} for file in json.loads(body)["files"]]
        self._answer(200, {"files": files})

    def _commit(self, hub, body, repo):
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(hub.files(repo))
        for line in lines:
            kind, value = line["key"], line["value"]
            if kind == "header" and value.get("parentCommit", hub.sha(repo)) != hub.sha(repo):
                return self._answer(412, {"error": "A commit has happened since."})
            if kind == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif kind == "deletedFile":
                del files[value["path"]]
        hub.commit(repo, files)
        url = f"{hub.address}/{repo}/commit/{hub.sha(repo)}"
        return self._answer(200, {"commitUrl": url, "commitOid": hub.sha(repo)})

    def _resolve(self, hub, body, repo, revision, file):
        found = hub.at(repo, revision)
        if found is None:
            return self._reject(404, "RevisionNotFound", "Invalid rev id")
        sha, files = found
        if file not in files:
            return self._reject(404, "EntryNotFound", "Entry not found")
        etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
        return self._answer(200, files[file], X_Repo_Commit=sha, ETag=etag)


REPO = r"(?P<repo>[\w.-]+/[\w.-]+?)"
ROUTES = [
    (r"HEAD /", _Handler._nothing),
    (r"POST /api/repos/create", _Handler._create),
    (r"POST /api/validate-yaml", _Handler._validate),
    (rf"GET /api/models/{REPO}", _Handler._info),
    (rf"POST /api/models/{REPO}/preupload/main", _Handler._preupload),
    (rf"POST /api/models/{REPO}/commit/main", _Handler._commit),
    (rf"(HEAD|GET) /{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", _Handler._resolve),
]
