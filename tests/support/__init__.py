"""Fakes and oracles the tests share; none of them is shipped."""
