"""Fixtures of this package's tests."""

from tests.channel.short_paths import short_dir as short_dir
