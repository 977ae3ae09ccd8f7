"""The same suite of the official client, against real SGLang workers behind the gateway."""

import openai
import pytest

from tests.contract.suite import *  # noqa: F403

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def base_url(real_stack):
    return f"{real_stack.config.url('gateway')}/v1"


def test_the_workers_own_refusal_has_the_shape(client):
    # The gateway does not know this field, and the worker does not like its value.
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"min_p": "much"},
        )
    assert set(error.value.body) == {"message", "type", "param", "code"}
    assert error.value.body["type"] == "invalid_request_error"
    assert error.value.param == "min_p"


def test_a_prompt_that_is_too_long_is_a_400(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "word " * 20000}], stream=True
        )
    assert error.value.body["type"] == "invalid_request_error"
