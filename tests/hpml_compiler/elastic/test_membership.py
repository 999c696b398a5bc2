"""A newer generation is announced -> what waits for the one before ends, at its store or for its members; others stay."""
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from hpml_compiler.elastic.membership import PREFIX, LauncherLost, Membership
from passes import compat

pytestmark = pytest.mark.timeout(60)
Announce = Callable[[int, list[int]], None]


@pytest.fixture
def announce(monkeypatch: pytest.MonkeyPatch) -> Announce:
    """Announces members of a generation, as the launcher does."""
    server = compat.loopback_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))

    def announced(number: int, members: list[int]) -> None:
        """The connection is a new one: those of this process are cut."""
        store = compat.store_below(PREFIX, compat.connect_to_store("127.0.0.1", server.port))
        store.set(f"members/{number}", json.dumps(members))

    return announced


def test_waits_at_the_store_end(announce: Announce) -> None:
    membership, found = Membership(0, 1), list[BaseException]()

    def wait() -> None:
        """As gloo waits for the address of a rank that is lost."""
        try:
            membership.store_of(1).get("address")
        except dist.DistError as error:
            found.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    announce(2, [0])
    waiting.join()
    assert len(found) == 1 and membership.changed and membership.newest() == 2
    assert membership.wait_until_ready(2)
    newest = membership.store_of(2)
    newest.set("address", "here")
    assert newest.get("address") == b"here"
    membership.close()
    with pytest.raises(LauncherLost):
        membership.check_launcher()


def test_the_wait_for_members_ends(announce: Announce) -> None:
    membership = Membership(0, 1)
    announce(2, [0, 1])
    while membership.newest() < 2:
        time.sleep(0.01)
    threading.Timer(0.1, announce, (3, [0])).start()
    assert not membership.wait_until_ready(2), "member 1 never leaves"
    assert membership.wait_until_ready(3)
    membership.close()
