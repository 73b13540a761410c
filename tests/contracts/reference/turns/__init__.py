"""Why turns miss, as router/turns/native finds it out, in Python and slowly: the naive model of its tests."""
