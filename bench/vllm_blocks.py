"""vLLM's half of ``issue.chunk``, run by vLLM's Python: hashes one prompt as often as it is asked.

Arguments: prompt tokens, vocabulary size, seed. Prints ``bench: `` and vLLM's version; then for each line on standard input (tokens
in a block) the seconds that hashing the prompt's blocks took, with the algorithm that vLLM configures by default.
"""

from __future__ import annotations

import gc
import random
import sys
import time

from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm import SamplingParams, __version__


def main() -> None:
    """Serve until standard input ends."""
    count, vocabulary, seed = map(int, sys.argv[1:4])
    drawn = random.Random(seed)
    prompt = [drawn.randrange(vocabulary) for _ in range(count)]
    algorithm = CacheConfig.__dataclass_fields__["prefix_caching_hash_algo"].default
    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    request = Request("bench", prompt, SamplingParams(max_tokens=1), None)
    gc.freeze()  # vLLM does so after its start-up
    print("bench:", __version__, flush=True)
    for line in sys.stdin:
        hasher = get_request_block_hasher(int(line), hash_function)
        begin = time.perf_counter()
        hashes = hasher(request)
        seconds = time.perf_counter() - begin
        if len(hashes) != count // int(line):
            raise RuntimeError("vLLM did not hash every block")
        print("bench:", seconds, flush=True)


main()
