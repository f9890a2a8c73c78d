"""Files read by ranges from a hub on loopback: what is asked, and every way in which an answer can be wrong."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from prunecli.errors import HubError
from prunecli.tensors.hub.fetch import RemoteFile
from prunecli.tensors.hub.names import HubName
from tests.hub_server import MAIN_COMMIT, Fault, hub

__all__ = ["hub"]

FILE = "model.safetensors"
CONTENT = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def waits(monkeypatch):
    """The seconds that huggingface_hub would wait between tries."""
    noted = []
    monkeypatch.setattr("time.sleep", noted.append)
    return noted


@pytest.fixture
def file(hub, waits):
    hub.add("org/tiny", {FILE: CONTENT})
    return RemoteFile(HubName("org/tiny"), MAIN_COMMIT, FILE, len(CONTENT))


def asked(hub):
    """The ranges of the GETs."""
    return [line.rpartition("bytes=")[2] for line in hub.requests if "bytes=" in line]


def read(file, start=1_000, stop=250_000, step=70_000):
    data = bytearray(stop - start)
    view = memoryview(data)
    fill = file.reading(start, stop - start)
    for at in range(0, len(data), step):
        fill(view[at : at + step])
    return bytes(data)


def short(file, start, count):
    return read(file, start, start + count)


def test_a_range_is_one_request(file, hub):
    assert read(file, step=999) == CONTENT[1_000:250_000]
    assert asked(hub) == ["1000-249999"]
    assert hub.sent == 249_000
    assert file.received == [hub.sent]


def test_many_threads_read(file, hub):
    hub.lifetime = 1_000
    starts = range(0, 2_000, 100)
    with ThreadPoolExecutor(20) as pool:
        found = pool.map(lambda start: short(file, start, 100), starts)
    assert [*found] == [CONTENT[start : start + 100] for start in starts]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(cut=5)],
        [Fault(cut=0), Fault(cut=100_000), None],
        [Fault(status=500), Fault(status=503), Fault(status=429)],
        [Fault(status=408)],
    ],
)
def test_what_passes_is_tried_again(file, hub, waits, faults):
    hub.faults = list(faults)
    assert read(file) == CONTENT[1_000:250_000]
    assert len(waits) == len([*filter(None, faults)])


def test_it_gives_up_in_the_end(file, hub, waits):
    hub.faults = [Fault(status=502)] * 100
    with pytest.raises(
        HubError, match=r"^org/tiny: model\.safetensors: .* \(502\).*\n.*resumes from what is fetched"
    ):
        read(file)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


def test_retry_after_is_heeded(file, hub, waits):
    hub.faults = [Fault(status=429, headers={"Retry-After": "17"})]
    assert read(file) == CONTENT[1_000:250_000]
    hub.faults = [Fault(status=429, headers={"RateLimit": '"resolvers";r=0;t=55'})]
    assert read(file) == CONTENT[1_000:250_000]
    assert waits == [18, 56]


EMPTY = Fault(status=206, headers={"Content-Range": "bytes 1000-1000/300000"})


@pytest.mark.parametrize("fault", [Fault(is_whole=True), Fault(shift=1), Fault(status=204), EMPTY])
def test_what_is_not_the_file_is_refused_at_once(file, hub, waits, fault):
    hub.faults = [fault]
    message = r"(?s)^org/tiny: model.safetensors: .* not with the range .*hf download org/tiny"
    with pytest.raises(HubError, match=message):
        read(file)
    assert waits == []
    assert len(asked(hub)) == 1


def test_shorter_ranges_than_asked_for_are_taken(file, hub, waits):
    hub.longest = 1_000
    assert read(file, stop=3_500) == CONTENT[1_000:3_500]
    assert asked(hub) == ["1000-3499", "2000-3499", "3000-3499"]
    assert waits == []


def test_addresses_that_expire_are_asked_for_again(file, hub, waits):
    hub.lifetime = 2
    assert [short(file, n, 10) for n in range(7)] == [CONTENT[n : n + 10] for n in range(7)]
    assert len(hub.addresses) == 4
    assert waits == []


def test_nobody_there(file, hub, waits, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    with pytest.raises(HubError, match="refused"):
        short(file, 0, 10)
    assert len(waits) == 8


@pytest.mark.parametrize("lifetime", [None, 10])
def test_the_token_goes_to_the_hub_alone(file, hub, monkeypatch, lifetime):
    """The other host of `hub_server` would answer nothing."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.lifetime = lifetime
    assert short(file, 0, 10) == CONTENT[:10]
    assert hub.tokens == {"Bearer hf_secret"}
    assert any("/signed/" in line for line in hub.requests) == (lifetime is not None)
