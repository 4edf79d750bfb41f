"""Events of a completion may have several tokens; none after the end of the answer is taken."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.adapters.rl.engines.completions import CompletionServer
from holdfast.adapters.rl.engines.protocol import TokenPlace
from holdfast.adapters.rl.samples.trajectory import TurnLimits
from holdfast.ckpt.errors import CorruptError

END = 1
LIMITS = TurnLimits(end=END, context=32, max_new_tokens=6)
PLACE = TokenPlace(seed=1, ordinal=0, sample=0, prompt=2)


@contextmanager
def serving(*events: list[int]) -> Iterator[CompletionServer]:
    """Run a server that answers everything with the same events of tokens."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for number, tokens in enumerate(events, 1):
                logprobs = {"token_logprobs": [-float(each) for each in tokens]}
                choice = {"token_ids": tokens, "logprobs": logprobs}
                reason = "length" if number == len(events) else None
                event = {"choices": [{**choice, "finish_reason": reason}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            yield CompletionServer(url=url, limits=LIMITS, version=3)
        finally:
            server.shutdown()
            thread.join()


def test_the_tokens_of_an_event_are_a_run() -> None:
    with serving([5], [6, 7], [], [8, 9, END]) as server:
        runs = [[each.token for each in run] for run in server.generate_runs((2, 3), PLACE)]
        found = list(server.generate((2, 3), PLACE))
    assert runs == [[5], [6, 7], [8, 9, END]]
    assert [tuple(each) for each in found] == [
        (token, -float(token), 3) for token in (5, 6, 7, 8, 9, END)
    ]


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        (([5, END, 6],), [5, END]),
        (([5, END], [6]), [5, END]),
        (([4, 5, 6, 7], [8, 9, 2, 3]), [4, 5, 6, 7, 8, 9]),
        (([4, 5, 6, 7, 8, 9], [2]), [4, 5, 6, 7, 8, 9]),
    ],
)
def test_no_token_after_the_end_of_an_answer_is_taken(
    events: tuple[list[int], ...], kept: list[int]
) -> None:
    found = []
    with serving(*events) as server, pytest.raises(CorruptError, match="after the end"):
        for each in server.generate((2, 3), PLACE):
            found.append(each.token)
    assert found == kept
