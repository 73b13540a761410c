"""Naive model of router/turns: the tests of why turns miss compare the two."""
