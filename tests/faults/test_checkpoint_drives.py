"""Checkpoints over CSD roots that are different file systems."""

import hashlib

from jaxinf.store import verify_step


def hashes(driver, name):
    """Returns the hash and inode of every chunk file of a checkpoint."""
    files = driver.opened.directory
    found = {}
    for number, leaf in enumerate(files.manifest.leaves):
        for state in leaf.states:
            for chunk in range(len(leaf.csds)):
                file = files.chunk_file(
                    f"checkpoints/{name}", number, chunk, state.name
                )
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                found[file] = (content, file.stat().st_ino, file.stat().st_dev)
    return found


def test_ten_steps_later_its_bytes_are_the_same(mount_ext4, place, drive):
    roots = [mount_ext4(f"csd{number}").path for number in range(3)]
    driver = drive(place / "store", csds=roots, chunk_elements=4096).init().steps(3)
    driver.store.checkpoint()
    before = hashes(driver, "3")
    assert len({device for *_, device in before.values()}) == 3
    driver.steps(10).check(13)
    assert hashes(driver, "3") == before
    driver.check(3, place / "store" / "checkpoints" / "3")
    assert verify_step(driver.opened.directory, place / "store/checkpoints/3") == []
    driver.close()
    again = drive(place / "store", restore="3").init()
    again.steps(10).check(13)
    assert hashes(again, "3") == before
