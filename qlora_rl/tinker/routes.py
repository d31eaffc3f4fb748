"""The routes of Tinker's API, with typed bodies. What is not offered is an error at once."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import queue
import secrets
import sqlite3
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat
from starlette.exceptions import HTTPException as StarletteError

from qlora_rl.contracts import SamplingSpec
from qlora_rl.engine.server import Gate
from qlora_rl.errors import ConfigConflictError
from qlora_rl.tinker.messages import MEDIA_TYPE, PassRequest
from qlora_rl.tinker.service import KINDS, Service

# A client asks again when this time is over.
_POLL_S = 20.0
_URLS_S = 3600
FILES = "/files/"
MOST_SAMPLES = 1024
# Of a body that is JSON: when it is read it takes up to 25 times as much.
_MOST_JSON_BYTES = 2**22
_MOST_METADATA, _MOST_SAID = 2**16, 2000
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Text = Annotated[str, Field(max_length=1024)]
Seq = Annotated[int, Field(ge=0, lt=2**53)]
Token = Annotated[int, Field(ge=0, lt=2**31)]


def _small(given: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(json.dumps(given))
    except RecursionError as error:
        raise ValueError("it is too deep") from error
    if size > _MOST_METADATA:
        raise ValueError(f"at most {_MOST_METADATA} bytes are kept")
    return given


Metadata = Annotated[dict[str, Any], AfterValidator(_small)]


class _Body(BaseModel):
    """What is not known is an error, rather than left out without a word."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: Text | None = None


class _Open(BaseModel):
    """A body of which this server needs nothing else."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class SessionBody(_Open):
    """`create_session`."""


class HeartbeatBody(_Body):
    """`session_heartbeat`."""

    session_id: Text


class LoraBody(BaseModel):
    """The adapter of a new model."""

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(ge=1, le=512)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(BaseModel):
    """The optimizer of a new model; AdamW is offered."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["adamw"] = "adamw"


class CreateBody(_Body):
    """`create_model`."""

    session_id: Text
    model_seq_id: Seq
    base_model: Text
    user_metadata: Metadata | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class AdamBody(BaseModel):
    """AdamW's numbers for one step."""

    model_config = ConfigDict(extra="forbid")
    learning_rate: FiniteFloat = Field(default=1e-4, ge=0)
    beta1: FiniteFloat = Field(default=0.9, ge=0, lt=1)
    beta2: FiniteFloat = Field(default=0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(default=1e-12, ge=0)
    weight_decay: FiniteFloat = 0.0
    grad_clip_norm: FiniteFloat = 0.0


class StepBody(_Body):
    """`optim_step`."""

    model_id: Text
    seq_id: Seq
    adam_params: AdamBody


class SaveBody(_Body):
    """`save_weights` and its two siblings."""

    model_id: Text
    seq_id: Seq
    path: Name | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=10 * 366 * 86400)
    overwrite: bool = False
    user_metadata: Metadata | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot"] = "snapshot"
    age_encryption_recipients: None = None


class LoadBody(_Body):
    """`load_weights`, into a model that there is, or as a new one."""

    model_id: Text | None = None
    seq_id: Seq | None = None
    session_id: Text | None = None
    model_seq_id: Seq | None = None
    base_model: Text | None = None
    user_metadata: Metadata | None = None
    path: Text
    optimizer: bool
    optimizer_config: OptimizerBody | None = None
    weights_access_token: None = None


class SamplerBody(_Body):
    """`create_sampling_session`."""

    session_id: Text
    sampling_session_seq_id: Seq
    base_model: Text | None = None
    model_path: Text | None = None


class ChunkBody(BaseModel):
    """Tokens of a prompt; images and audio are not offered."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class InputBody(BaseModel):
    """A prompt."""

    model_config = ConfigDict(extra="forbid")
    chunks: list[ChunkBody]


class ParamsBody(BaseModel):
    """How to sample."""

    model_config = ConfigDict(extra="forbid")
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Text | Annotated[list[Text] | list[Token], Field(max_length=256)] | None = None
    temperature: FiniteFloat = Field(default=1.0, ge=0)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: FiniteFloat = Field(default=1.0, gt=0, le=1)


class SampleBody(_Body):
    """`asample`."""

    num_samples: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    prompt: InputBody
    sampling_params: ParamsBody
    sampling_session_id: Text
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    def prompt_ids(self) -> list[int]:
        """The prompt's tokens."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def spec(self, longest: int) -> SamplingSpec:
        """In the engine's words.

        Args:
            longest: prompt plus completion, in tokens.
        """
        asked, extra = self.sampling_params, dict[str, Any]()
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        if stop == []:
            extra["ignore_eos"] = True
        texts = [each for each in stop or () if isinstance(each, str)]
        if texts:
            extra |= {"stop": texts, "detokenize": True, "include_stop_str_in_output": True}
        return SamplingSpec(
            max_tokens=asked.max_tokens or max(1, longest - len(self.prompt_ids())),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k),
            seed=asked.seed,
            extra=extra,
            stop_token_ids=[each for each in stop or () if isinstance(each, int)],
        )


class FutureBody(_Body):
    """`retrieve_future`."""

    request_id: Text
    allow_metadata_only: bool = False


class InfoBody(_Body):
    """`get_info`."""

    model_id: Text


class PathBody(_Body):
    """`weights_info`."""

    tinker_path: Text


class KeyGate(Gate):
    """A gate for several keys, each of which is an owner of sessions and models; the client sends them in a header of
    its own. Signed URLs need none.

    Args:
        app, keys, max_body_bytes: as `Gate` takes them.
    """

    way = "Send the header 'X-API-Key: KEY', as the client does with api_key=."

    def __init__(self, app: Any, keys: list[str], max_body_bytes: int) -> None:
        super().__init__(app, keys[0], max_body_bytes)
        self._owners = {hashlib.sha256(key.encode()).digest(): owner_of(key) for key in keys}

    def _limit(self, scope: Any) -> int:
        is_pass = scope["path"] == "/api/v1/forward_backward"
        return self.max_body_bytes if is_pass else min(_MOST_JSON_BYTES, self.max_body_bytes)

    def _knows(self, scope: Any) -> bool:
        if scope["path"].startswith(FILES):
            return True
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        digest = hashlib.sha256(given[0].strip() if len(given) == 1 else b"").digest()
        found = [owner for known, owner in self._owners.items() if hmac.compare_digest(known, digest)]
        scope.setdefault("state", {})["owner"] = found[0] if found else ""
        return bool(found)


def owner_of(key: str) -> str:
    """What the journal calls the client that has this key."""
    return hashlib.sha256(b"owner " + key.encode()).hexdigest()[:16]


def make_app(service: Service, tokenizer: str) -> FastAPI:
    """The app, without its gate.

    Args:
        tokenizer: from where clients on this machine load it.
    """
    app = FastAPI(title="qlora-rl tinker", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_Api(service, tokenizer).router())

    def answers(status: int, *kinds: Any, category: str = "user") -> None:
        def answer(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse({"error": _said(error), "category": category}, getattr(error, "status_code", status))

        for kind in kinds:
            app.add_exception_handler(kind, answer)

    answers(404, LookupError, StarletteError)
    answers(422, ConfigConflictError, ValueError, RequestValidationError)
    answers(429, queue.Full)  # the client waits a little
    answers(503, sqlite3.Error, category="server")  # the client asks again
    return app


class _Api:
    def __init__(self, service: Service, tokenizer: str) -> None:
        self._service, self._tokenizer = service, tokenizer
        self._signing = secrets.token_bytes(32)

    def router(self) -> APIRouter:
        """All routes."""
        router = APIRouter()
        for name in ("healthz", "get_server_capabilities"):
            router.get(f"/api/v1/{name}")(getattr(self, name))
        router.get("/health")(self.healthz)
        for path, answer in (
            ("client/config", self.config),
            ("client/dynamic_config", self.dynamic_config),
            ("telemetry", self.telemetry),
            ("create_session", self.create_session),
            ("session_heartbeat", self.session_heartbeat),
            ("sessions/{session}/finish", self.finish),
            ("create_model", self.create_model),
            ("get_info", self.get_info),
            ("forward_backward", self.forward_backward),
            ("optim_step", self.optim_step),
            ("save_weights", self.save_weights),
            ("save_weights_for_sampler", self.save_weights_for_sampler),
            ("save_weights_external", self.save_weights_external),
            ("load_weights", self.load_weights),
            ("weights_info", self.weights_info),
            ("create_sampling_session", self.create_sampling_session),
            ("asample", self.asample),
            ("retrieve_future", self.retrieve_future),
        ):
            router.post(f"/api/v1/{path}")(answer)
        runs = "/api/v1/training_runs/{model}"
        router.get("/api/v1/samplers/{sampler}")(self.about_sampler)
        router.get("/api/v1/sessions/{session}")(self.about_session)
        router.get(runs)(self.about_model)
        router.get(runs + "/checkpoints")(self.checkpoints)
        router.delete(runs + "/checkpoints/{kind}/{name}")(self.remove_checkpoint)
        router.get(runs + "/checkpoints/{kind}/{name}/external_weights_urls")(self.urls)
        router.get(FILES + "{directory}/{expires}/{signature}/{file}")(self.file)
        router.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])(self.nothing)
        return router

    def healthz(self) -> Any:
        dead = self._service.dead()
        return JSONResponse({"status": f"ended: {', '.join(dead)}"}, 503) if dead else {"status": "ok"}

    def get_server_capabilities(self) -> dict[str, Any]:
        length = self._service.adapters.max_model_length
        model = {"model_name": self._service.model_name, "max_context_length": length}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    def config(self) -> dict[str, Any]:
        # What this server does not do: exchange keys, compress, poll by session, run losses of others.
        off = ("pjwt_auth_enabled", "proto_compress_fwdbwd", "sample_use_retrieve_futures", "custom_loss_server_side")
        return dict.fromkeys(off, False)

    def dynamic_config(self) -> dict[str, Any]:
        return {"sample_cancel_enabled": False}

    def telemetry(self) -> dict[str, str]:
        return {"status": "accepted"}  # and thrown away

    def create_session(self, body: SessionBody, request: Request) -> dict[str, Any]:
        session = self._service.begin_session(request.state.owner)
        return {"type": "create_session", "session_id": session}

    def session_heartbeat(self, body: HeartbeatBody, request: Request) -> dict[str, str]:
        if self._service.session(body.session_id, request.state.owner)["ended"]:
            raise HTTPException(410, "this session was finished")
        return {"type": "session_heartbeat"}

    def finish(self, session: str, request: Request) -> dict[str, Any]:
        self._service.end_session(session, request.state.owner)
        return {}

    def create_model(self, body: CreateBody, request: Request) -> dict[str, Any]:
        lora = body.lora_config
        if lora is None:
            raise ConfigConflictError("creating a model: full fine-tuning is not offered. Give a lora_config.")
        self._check_base(body.base_model)
        adapter = {"rank": lora.rank, "seed": lora.seed, "attention": lora.train_attn, "mlp": lora.train_mlp}
        return self._noted(
            self._service.create(
                body.session_id,
                request.state.owner,
                body.model_seq_id,
                "create_model",
                json.dumps({"adapter": adapter}).encode(),
                body.user_metadata,
            )
        )

    def _check_base(self, name: str | None) -> None:
        if name not in (None, self._service.model_name):
            raise ConfigConflictError(
                f"choosing a base: this server holds {self._service.model_name!r} alone, and {name!r} is asked for."
            )

    @staticmethod
    def _noted(request: tuple[str, int]) -> dict[str, Any]:
        return {"request_id": f"{request[0]}#{request[1]}", "model_id": request[0]}

    def get_info(self, body: InfoBody, request: Request) -> dict[str, Any]:
        model = self._service.model(body.model_id, request.state.owner)
        name = self._service.model_name
        data = {"arch": None, "model_name": name, "tokenizer_id": self._tokenizer}
        about = {"model_id": body.model_id, "is_lora": True, "lora_rank": model["rank"], "model_name": name}
        return {"type": "get_info", "model_data": data} | about

    async def forward_backward(self, request: Request) -> dict[str, Any]:
        return self._noted(await run_in_threadpool(self._pass, await request.body(), request.state.owner))

    def _pass(self, body: bytes, owner: str) -> tuple[str, int]:
        asked = PassRequest.parse(body, self._service.adapters.max_model_length)
        kind = "forward" if asked.forward_only else "pass"
        return self._service.submit(asked.model_id, owner, asked.seq_id, kind, body)

    def optim_step(self, body: StepBody, request: Request) -> dict[str, Any]:
        return self._submit(body, request, "optim_step", body.adam_params.model_dump())

    def _submit(
        self, body: Any, request: Request, kind: str, content: dict[str, Any], same: bytes | None = None
    ) -> dict[str, Any]:
        noted = (body.model_id, request.state.owner, body.seq_id, kind, json.dumps(content).encode(), same)
        return self._noted(self._service.submit(*noted))

    def _save(self, body: SaveBody, request: Request, kind: str, name: str | None) -> dict[str, Any]:
        content = {
            "name": name,
            "ttl_seconds": body.ttl_seconds,
            "overwrite": body.overwrite,
            "user_metadata": body.user_metadata,
        }
        same = json.dumps(content).encode()  # the client counts its samplers on when it sends a request again
        return self._submit(body, request, kind, content | {"sampler": body.sampling_session_seq_id}, same)

    def save_weights(self, body: SaveBody, request: Request) -> dict[str, Any]:
        return self._save(body, request, "weights", body.path)

    def save_weights_for_sampler(self, body: SaveBody, request: Request) -> dict[str, Any]:
        if (body.path is None) == (body.sampling_session_seq_id is None):
            raise ConfigConflictError("saving for a sampler: give a path or a sampling_session_seq_id, one of them.")
        return self._save(body, request, "sampler_weights", body.path)

    def save_weights_external(self, body: SaveBody, request: Request) -> dict[str, Any]:
        return self._save(body, request, "external_weights", body.path)

    def load_weights(self, body: LoadBody, request: Request) -> dict[str, Any]:
        self._check_base(body.base_model)
        content = {"path": body.path, "optimizer": body.optimizer}
        if body.session_id is None and body.model_id is not None and body.seq_id is not None:
            return self._submit(body, request, "load_weights", content)
        if body.session_id is None or body.model_seq_id is None:
            raise ConfigConflictError("loading weights: give model_id and seq_id, or session_id and model_seq_id.")
        sent, owner = json.dumps(content).encode(), request.state.owner
        self._service.saved(body.path, owner)
        noted = (body.session_id, owner, body.model_seq_id, "open_model", sent, body.user_metadata)
        return self._noted(self._service.create(*noted))

    def weights_info(self, body: PathBody, request: Request) -> dict[str, Any]:
        saved = self._service.saved(body.tinker_path, request.state.owner)
        model = self._service.model(saved["model"], request.state.owner)
        about = {"base_model": self._service.model_name, "is_lora": True, "lora_rank": model["rank"]}
        return about | {"train_unembed": False}

    def create_sampling_session(self, body: SamplerBody, request: Request) -> dict[str, Any]:
        if body.model_path is None:
            self._check_base(body.base_model or "")
        asked = (body.session_id, request.state.owner, body.sampling_session_seq_id, body.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": self._service.open_sampler(*asked)}

    def asample(self, body: SampleBody, request: Request) -> dict[str, Any]:
        noted = self._service.sample(body.sampling_session_id, request.state.owner, body.seq_id, body)
        return {"request_id": noted, "sample_sequence_ids": [f"{noted}/{i}" for i in range(body.num_samples)]}

    async def retrieve_future(self, body: FutureBody, request: Request) -> Response:
        try:
            found = await run_in_threadpool(self._service.future, body.request_id, request.state.owner)
        except LookupError as error:  # the client asks for the same again, where it can
            raise HTTPException(410, str(error)) from error
        try:
            form, content = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(found)), _POLL_S)
        except TimeoutError:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        media_type = MEDIA_TYPE if form == "proto" else "application/json"
        return Response(content, 503 if form == "again" else 200, media_type=media_type)

    def about_sampler(self, sampler: str, request: Request) -> dict[str, Any]:
        found = self._service.sampler(sampler, request.state.owner)
        path = found["path"] or None
        return {"sampler_id": sampler, "base_model": self._service.model_name, "model_path": path}

    def about_session(self, session: str, request: Request) -> dict[str, Any]:
        owner = request.state.owner
        self._service.session(session, owner)
        models = self._service.journal.rows("models", session=session, owner=owner)
        samplers = self._service.journal.rows("samplers", session=session, owner=owner)
        return {"training_run_ids": [m["id"] for m in models], "sampler_ids": [s["id"] for s in samplers]}

    def about_model(self, model: str, request: Request) -> dict[str, Any]:
        found = self._service.model(model, request.state.owner)
        return {
            "training_run_id": model,
            "base_model": self._service.model_name,
            "model_owner": found["owner"],
            "is_lora": True,
            "lora_rank": found["rank"],
            "last_request_time": _time(found["used"] or time.time()),
            "user_metadata": json.loads(found["metadata"]),
        }

    def checkpoints(self, model: str, request: Request) -> dict[str, Any]:
        return {
            "checkpoints": [
                {
                    "checkpoint_id": "/".join(row["path"].split("/")[-2:]),
                    "checkpoint_type": KINDS[row["kind"]],
                    "time": _time(row["made"]),
                    "tinker_path": row["path"],
                    "size_bytes": row["size"],
                    "user_metadata": json.loads(row["metadata"]),
                    "expires_at": _time(row["expires"]) if row["expires"] else None,
                }
                for row in self._service.checkpoints(model, request.state.owner)
            ]
        }

    def remove_checkpoint(self, model: str, kind: str, name: str, request: Request) -> Response:
        self._service.forget(self._service.saved(f"tinker://{model}/{kind}/{name}", request.state.owner))
        return Response(status_code=204)

    def urls(self, model: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        path = f"tinker://{model}/{kind}/{name}"
        if kind != "external_weights":
            raise ConfigConflictError(f"downloading: {path} was saved for this server. Use save_weights_external.")
        directory = self._service.saved(path, request.state.owner)["directory"]
        expires = int(time.time()) + _URLS_S
        start = f"{request.base_url}{FILES[1:]}{directory}/{expires}/{self._signature(directory, expires)}/"
        files = sorted(file.name for file in (self._service.root / "stored" / directory).glob("*"))
        if not files:
            raise LookupError(f"the files of {path!r} are gone")
        return {"urls": {file: start + file for file in files}, "expires": _time(expires)}

    def _signature(self, directory: str, expires: int) -> str:
        return hmac.new(self._signing, f"{directory} {expires}".encode(), "sha256").hexdigest()

    def file(self, directory: str, expires: int, signature: str, file: str) -> Response:
        wanted = self._signature(directory, expires)
        if expires < time.time() or not hmac.compare_digest(wanted.encode(), signature.encode()):
            raise HTTPException(403, "this URL is not signed, or has expired")
        known = {each.name: each for each in (self._service.root / "stored" / directory).glob("*")}
        if file not in known:
            raise HTTPException(404, "there is no such file")
        return FileResponse(known[file])

    def nothing(self, path: str) -> Response:
        error = f"{path!r} is not offered here; docs/adapters-server.md says what is"
        return JSONResponse({"error": error, "category": "user"}, 404)


def _said(error: Exception) -> str:
    """What is wrong, without what was sent, which may be large, or no JSON."""
    if isinstance(error, RequestValidationError):
        found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:8]]
        said = "reading the body: " + "; ".join(found)
    elif isinstance(error, StarletteError):
        said = str(error.detail)
    elif isinstance(error, sqlite3.Error):
        said = f"the journal cannot be used: {error}"
    else:
        said = str(error).strip("'\"")
    return said[:_MOST_SAID].encode(errors="replace").decode()


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
