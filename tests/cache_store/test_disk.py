"""Limits of the process that reads snapshots."""

import resource

from cache_store.disk import allow_many_files


def test_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        allow_many_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
