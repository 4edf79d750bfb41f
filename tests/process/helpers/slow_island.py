"""An island that gives one payload on a slow line, until it is killed; prints its port."""

from __future__ import annotations

import hashlib
import sys
import threading
from pathlib import Path

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.islands.haul.line import PacedLines
from holdfast.elastic.islands.haul.offers import Offers

if __name__ == "__main__":
    key, payload = RunKey.load(Path(sys.argv[1])), Path(sys.argv[2]).read_bytes()
    offers = Offers(key, host="127.0.0.1", port=0, up=PacedLines.of(100_000, 0).up)
    offers.offer(hashlib.blake2b(payload, digest_size=16).hexdigest(), payload)
    print(offers.port, flush=True)
    threading.Event().wait()
