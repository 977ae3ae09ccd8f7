"""The mapper service: converts pages of one model into pages of another, over HTTP."""
