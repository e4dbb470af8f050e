"""Programs that go wrong in a compiler, each under the name of a right one."""
