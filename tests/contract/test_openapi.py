"""Generated requests, valid and not, against the published description: no server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

# Operations without a body have few different requests; most cases go to the other two.
CASES = 420


def operations(stack):
    schema = schemathesis.openapi.from_url(f"{stack.url}/openapi.json")
    return [result.ok() for result in schema.get_all_operations()]


def is_admin(operation):
    return operation.path.startswith("/admin/")


def test_no_server_error_in_2000_cases(stack):
    made = 0
    refused = 0
    for operation in operations(stack):
        if is_admin(operation):
            continue
        # The readiness of a gateway that has gone away is rightly a 503.
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method != "post":
                continue

            @settings(
                max_examples=CASES,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case):
                nonlocal made, refused
                made += 1
                if made % 2 and isinstance(case.body, dict):
                    # No generator hits upon a model's name: half are helped to get further.
                    case.body["model"] = "small"
                    case.headers.pop("x-baton-policy", None)
                response = case.call()
                refused += response.status_code >= 400
                case.validate_response(response, checks=[not_a_server_error])

            one()
    assert made >= 2000
    # Both kinds came through, or the generator did not do what it should.
    assert 0.1 < refused / made < 0.95
    assert len(stack.small[0].seen) > 100


def test_the_description_is_valid_openapi(stack):
    paths = {(op.method, op.path) for op in operations(stack)}
    assert ("post", "/v1/chat/completions") in paths
    assert ("post", "/admin/sessions/{session}/reanchor") in paths
    assert len(paths) == 10


def test_no_server_error_at_the_operators_paths(tmp_path):
    from tests.stack import Stack, Talk

    key = tmp_path / "admin.key"
    key.write_text("the-admin-key")
    stack = Stack(auth={"admin_key_file": str(key)})
    Talk("s").turn(stack)
    statuses = set()
    try:
        for operation in filter(is_admin, operations(stack)):

            @settings(
                max_examples=15, deadline=None, derandomize=True, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
            def one(case):
                response = case.call(headers={"authorization": "Bearer the-admin-key"})
                statuses.add(response.status_code)
                case.validate_response(response, checks=[not_a_server_error])

            one()
        assert {200, 404} <= statuses
    finally:
        stack.stop()


@pytest.mark.parametrize("model", ["", " ", "%", "..", "a/b", "\u00e9", "x" * 3000])
def test_odd_model_names_in_the_path(stack, model):
    import httpx

    answer = httpx.get(f"{stack.url}/v1/models/{model}")
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
