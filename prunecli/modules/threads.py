"""Work on many experts shared out to threads, each of which runs torch's operations alone.

Whole experts do not wait for each other, as torch's own threads do after each of their products.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

MIN_WEIGHT_BYTES = 8 << 20
MIN_PRODUCTS = 1 << 26
"""Below both of these bytes read and multiply-adds, handing work to threads costs more than it saves."""

Item = TypeVar("Item")


def pays(items: int, weight_bytes: int, products: int) -> bool:
    """Whether threads are worth their while.

    Args:
        items: pieces of work.
        weight_bytes: read in all.
        products: multiply-adds in all.
    """
    return (
        items > 1
        and torch.get_num_threads() > 1
        and (weight_bytes >= MIN_WEIGHT_BYTES or products >= MIN_PRODUCTS)
    )


def in_threads(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call `function` on each item, without gradients, in `torch.get_num_threads()` threads, in any order.

    Raises:
        Exception: the first one that a call raised; items not yet begun are left out then.
    """
    waiting = deque(items)
    # Tensors of inference mode can be used in inference mode alone: the threads make those that the caller can use.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def work() -> None:
        with mode():
            while waiting:
                try:
                    item = waiting.popleft()
                except IndexError:  # another thread took the last one
                    return
                function(item)

    count = torch.get_num_threads()
    threads = [_pool(count).submit(work) for _ in range(min(count, len(items)))]
    try:
        for thread in threads:
            thread.result()
    finally:  # after an interrupt or a failure, the threads stop after the items they are at
        waiting.clear()
        wait(threads)  # what they use may be freed next


_pools: dict[int, ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def _pool(threads: int) -> ThreadPoolExecutor:
    """One pool per number of threads; its threads run torch's operations alone."""
    with _pools_lock:
        if threads not in _pools:
            _pools[threads] = lone_threads(threads, "expert")
        return _pools[threads]


def lone_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads, all begun, each of which runs torch's operations alone."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, name, initializer=_work_alone)
    ready = threading.Barrier(count + 1)
    for _ in range(count):
        pool.submit(ready.wait)
    ready.wait()
    # A thread's setting is also the default of threads to come: put back the caller's.
    torch.set_num_threads(before)
    return pool


def _work_alone() -> None:
    """Have this thread run torch's operations without help."""
    torch.set_num_threads(1)
    torch.get_num_threads()  # a thread's first look replaces its setting by the default: look while that is 1


def _forget_pools() -> None:
    """In a forked child, where the threads of the parent do not exist."""
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_pools)
