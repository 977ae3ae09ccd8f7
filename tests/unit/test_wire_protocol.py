"""The gateway's and the mapper's sides of the wire protocol, held to each other.

They are apart because neither imports the other.
"""

from typing import get_args

import httpx
import pytest

from mapper.service import protocol
from router.transfer.client import MapperClient, Namespace, TransferAnswer, TransferRequest
from router.transfer.pairs import Pair
from router.transfer.plan import _WORD


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("native_tail", "epoch"), [(None, None), (16, "lossy:s:1-ab")])
async def test_the_mapper_understands_the_gateways_requests(background, native_tail, epoch):
    request = TransferRequest(
        session="s",
        token_ids=[1, 2],
        deadline_ms=10,
        native_tail=native_tail,
        min_mapped_tokens=0,
        background=background,
        source=Namespace(model="small", extra_key=epoch, cache_salt="t"),
        target=Namespace(model="large", extra_key="lossy:s:2-cd", cache_salt="t"),
    )
    result = protocol.TransferResult(
        status="applied", reason=protocol.Reason.MAPPED, tokens=2, mapped_tokens=2, pair="a->b"
    )
    received = []

    def answer(sent: httpx.Request) -> httpx.Response:
        received.append(protocol.TransferRequest.model_validate_json(sent.content))
        return httpx.Response(200, content=result.model_dump_json())

    client = MapperClient("http://mapper")
    client._client = httpx.AsyncClient(
        base_url="http://mapper", transport=httpx.MockTransport(answer)
    )
    told = await client.transfer(request, 1.0)
    assert received[0].model_dump() == request.model_dump()
    assert told.model_dump() == result.model_dump(include=set(TransferAnswer.model_fields))
    await client.close()


def test_the_gateway_understands_all_that_the_mapper_may_answer():
    status = TransferAnswer.model_fields["status"].annotation
    assert set(get_args(status)) == set(get_args(protocol.Status))
    assert set(TransferAnswer.model_fields) <= set(protocol.TransferResult.model_fields)
    # Else it would be counted as "other".
    assert all(_WORD.match(reason) for reason in protocol.Reason)
    pair = protocol.Pair(
        source="a", target="b", status="ready", artifact="x", quality={"tasks": {}}
    )
    told = Pair.model_validate_json(pair.model_dump_json())
    assert told.model_dump() == pair.model_dump(include=set(Pair.model_fields))
