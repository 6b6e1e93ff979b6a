"""Compiled modules over the headers of ``include/pagedcache``: numbers, rows, hashes.

They check nothing that a Python module above them has checked; users call those modules.
"""
