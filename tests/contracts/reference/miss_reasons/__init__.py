"""Naive model of router/miss_reasons: the tests of why turns miss compare the two."""
