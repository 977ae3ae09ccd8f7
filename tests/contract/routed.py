"""A routed request, the tier that answered it, and prices: what tests of policies at work share."""

from tests.stack import user

BODY = {"model": "auto", "messages": [user()]}
PRICES = {
    "small": {"prompt": 1, "completion": 2},
    "large": {"prompt": 10, "cached": 1, "completion": 20},
}


def tier(stack, **headers):
    return stack.post(BODY, headers).headers["x-baton-tier"]
