"""The endpoint: completions and chats as OpenAI's API has them, over HTTP."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from thinwire.types import InputError, ThinwireError
from thinwire.uses.serving.run.asked_texts import AskedReader, AskedTexts
from thinwire.uses.serving.run.text_pieces import TextPieces
from thinwire.uses.serving.text_engine import TextEngine
from thinwire.uses.serving.text_requests import LENGTH, STOP, FullError, Said, Text

MOST_BODY = 1 << 22  # bytes of a call
MOST_READ = 1 << 26  # of a longer one that are read, so that its client hears why it is refused
SENDING = 60.0  # seconds that a call may take to come
LOOK = 0.5  # seconds between two looks whether a client is still there
Piece = tuple[int, str, str | None]  # of which answer, text, why it ended


@dataclass(frozen=True)
class Served:
    """What an endpoint serves: ``engine`` continues texts of the model ``name``. ``key``: what clients send.

    ``ends``: tokens that end a text.
    """

    engine: TextEngine
    reader: AskedReader
    tokenizer: Any
    name: str
    ends: frozenset[int] = frozenset()
    key: str | None = None
    began: int = field(default_factory=lambda: int(time.time()))


def application(served: Served) -> Starlette:
    """Return the endpoint as an ASGI application."""

    async def completions(request: Request) -> Response:
        return await _answer(served, request, chat=False)

    async def chats(request: Request) -> Response:
        return await _answer(served, request, chat=True)

    async def models(request: Request) -> Response:
        refused = _refused(served, request)
        about = {"id": served.name, "object": "model", "created": served.began, "owned_by": "thinwire"}
        return refused or JSONResponse({"object": "list", "data": [about]})

    async def health(request: Request) -> Response:
        error = served.engine.error
        state = {"running": served.engine.running, "waiting": served.engine.waiting}
        lost = {"lost": served.engine.lost} if served.engine.lost else {}
        return JSONResponse(state | lost | ({"error": str(error)} if error else {}), 503 if error else 200)

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ]
    )


async def _answer(served: Served, request: Request, chat: bool) -> Response:
    refused = _refused(served, request)
    if refused is not None:
        return refused
    try:
        async with asyncio.timeout(SENDING):
            values = await _body(request)
        asked = served.reader.chat(values) if chat else served.reader.completion(values)
        call = Call(served, asked, chat)
    except InputError as e:
        return _error(str(e), 400, "invalid_request_error")
    except TimeoutError:
        late = f"the call did not come within {SENDING:g} s; send it at once"
        return _error(late, 408, "invalid_request_error")
    except FullError as e:
        return _error(str(e), 429, "rate_limit_error", {"Retry-After": "1"})
    except ThinwireError as e:
        return _error(str(e), 503, "server_error")
    if asked.stream:
        return StreamingResponse(call.events(), media_type="text/event-stream")
    return await call.whole(request)


async def _body(request: Request) -> dict[str, Any]:
    """Return the fields of a call. Errors: ``InputError``."""
    data, nbytes = bytearray(), 0
    async for piece in request.stream():
        nbytes += len(piece)
        if nbytes <= MOST_BODY:
            data += piece
        elif nbytes > MOST_READ:
            break
    if nbytes > MOST_BODY:
        raise InputError(f"the call has more than {MOST_BODY} bytes; send a shorter prompt")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"the call is no JSON: {e}") from e
    if not isinstance(found, dict):
        raise InputError("the call is no JSON object; send one with a prompt or messages")
    return found


def _refused(served: Served, request: Request) -> Response | None:
    if served.key is None:
        return None
    given = request.headers.get("authorization", "")
    good = hmac.compare_digest(given.encode(), f"Bearer {served.key}".encode())
    return (
        None
        if good
        else _error("this endpoint needs its key, as Authorization: Bearer KEY", 401, "auth_error")
    )


def _error(text: str, status: int, kind: str, more: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(_trouble(text, kind), status, more)


def _trouble(text: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


class Call:
    """One call: its texts under way, and what is said of them. Errors: as of ``TextEngine.submit``."""

    def __init__(self, served: Served, asked: AskedTexts, chat: bool) -> None:
        self._served, self._asked, self._chat = served, asked, chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._pieces = [
            TextPieces(served.tokenizer, asked.stops) for _ in range(asked.many * len(asked.prompts))
        ]
        self._said: asyncio.Queue[tuple[int, Said]] = asyncio.Queue()
        self._texts = list[Text]()
        try:
            for k, one in enumerate(asked.requests(served.ends)):
                self._texts.append(served.engine.submit(one, self._teller(k)))
        except ThinwireError:
            self._cancel()
            raise

    def _teller(self, k: int) -> Callable[[Said], object]:
        loop = asyncio.get_running_loop()
        return lambda said: loop.call_soon_threadsafe(self._said.put_nowait, (k, said))

    def _cancel(self) -> None:
        for text in self._texts:
            if not text.reason:
                self._served.engine.cancel(text)

    async def _come(self) -> AsyncIterator[Piece]:
        """Yield pieces of the answers as they come, and why each ended. Errors: ``ThinwireError``."""
        left = set(range(len(self._texts)))
        while left:
            k, said = await self._said.get()
            if isinstance(said, ThinwireError):
                raise said
            if k not in left:
                continue
            pieces = self._pieces[k]
            if isinstance(said, list):
                text = pieces.add(said)
                if text:
                    yield k, text, None
                if not pieces.stopped:
                    continue
                self._served.engine.cancel(self._texts[k])
                said = STOP
            rest = pieces.end()
            left.discard(k)
            yield k, rest, STOP if pieces.stopped or said != LENGTH else LENGTH

    async def whole(self, request: Request) -> Response:
        """Return the answers in one piece; nothing where the client went away."""
        texts, reasons = [""] * len(self._texts), [STOP] * len(self._texts)

        async def gather() -> None:
            async for k, text, reason in self._come():
                texts[k] += text
                reasons[k] = reason or reasons[k]

        task = asyncio.create_task(gather())
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK)
                if not task.done() and await request.is_disconnected():
                    return Response(status_code=499)
            task.result()
        except ThinwireError as e:
            return _error(str(e), 503, "server_error")
        finally:
            task.cancel()
            self._cancel()
        choices = [self._choice(k, texts[k], reasons[k]) for k in range(len(texts))]
        kind = "chat.completion" if self._chat else "text_completion"
        return JSONResponse(self._head(kind) | {"choices": choices, "usage": self._usage()})

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the answers as server-sent events."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        try:
            if self._chat:
                for k in range(len(self._texts)):
                    start = {"index": k, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                    yield _event(self._head(kind) | {"choices": [start]})
            async for k, text, reason in self._come():
                yield _event(self._head(kind) | {"choices": [self._delta(k, text, reason)]})
            if self._asked.usage:
                yield _event(self._head(kind) | {"choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        except ThinwireError as e:
            yield _event(_trouble(str(e), "server_error"))
        finally:
            self._cancel()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self._served.name}

    def _choice(self, k: int, text: str, reason: str) -> dict[str, Any]:
        own = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {"index": k, **own, "logprobs": None, "finish_reason": reason}

    def _delta(self, k: int, text: str, reason: str | None) -> dict[str, Any]:
        own: Mapping[str, Any] = {"text": text}
        if self._chat:
            own = {"delta": {"content": text} if text else {}}
        return {"index": k, **own, "logprobs": None, "finish_reason": reason}

    def _usage(self) -> dict[str, Any]:
        prompt, made = sum(map(len, self._asked.prompts)), sum(len(t.made) for t in self._texts)
        about = {"accepted_prediction_tokens": sum(t.accepted for t in self._texts)}
        about["rejected_prediction_tokens"] = sum(t.drafted - t.accepted for t in self._texts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(t.reused for t in self._texts)},
            "completion_tokens_details": about,
        }


def _event(values: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"
