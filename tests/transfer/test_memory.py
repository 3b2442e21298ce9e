"""Free memory: of the machine, and of control groups of both versions."""

from jaxinf.transfer import free_memory

GIB = 1 << 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(path, limit, used, inactive, names):
    write(path / names[0], f"{limit}\n")
    write(path / names[1], f"{used}\n")
    write(path / "memory.stat", f"anon 5\n{names[2]} {inactive}\n")


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
V2 = "memory.max", "memory.current", "inactive_file"


def test_the_least_counts(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"

    def found():
        return free_memory(proc=proc, cgroups=groups)

    assert free_memory()[0] > 0  # of this machine
    assert found() is None
    write(proc / "meminfo", "MemTotal: 8 kB\n")  # an old kernel
    assert found() is None
    write(proc / "meminfo", f"MemTotal: 99 kB\nMemAvailable: {8 << 20} kB\n")
    assert found() == (8 * GIB, "the machine")
    write(proc / "self/cgroup", "0::/pod/box\n")
    group(groups / "pod/box", "max", GIB, 0, V2)
    assert found() == (8 * GIB, "the machine")
    # Of what is used, files in the cache are freed on demand.
    group(groups / "pod", 4 * GIB, 3 * GIB, GIB, V2)
    limit = groups / "pod/memory.max"
    assert found() == (2 * GIB, f"the limit of {4 * GIB} bytes in {limit}")
    group(groups / "pod/box", GIB, 2 * GIB, 0, V2)
    assert found()[0] == 0


def test_a_container_with_its_own_root(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    text = "7:cpu,cpuacct:/x\n4:memory:/docker/of-the-host\n0::/\n"
    write(proc / "self/cgroup", text)
    group(groups / "memory", 4 * GIB, GIB, 0, V1)
    assert free_memory(proc=proc, cgroups=groups)[0] == 3 * GIB
    group(groups / "memory/docker", 2 * GIB, GIB, 0, V1)
    assert free_memory(proc=proc, cgroups=groups)[0] == GIB
