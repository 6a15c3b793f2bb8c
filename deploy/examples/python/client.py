"""A complete client: attaches a model, shows its tensors, and that a write is its own copy. docs/python.md explains it."""

import sys

import resvisor


def show_progress(done: int, total: int) -> None:
    print(f"loading: {done} of {total} bytes", file=sys.stderr)


def main() -> int:
    try:
        with resvisor.connect() as connection, connection.attach(sys.argv[1], progress=show_progress, timeout=600) as lease:
            print(f"{lease.model}: generation {lease.generation}, {len(lease)} tensors, {lease.read_bytes} bytes read")
            for tensor in list(lease.tensors())[:3]:
                print(f"{tensor.name}: {tensor.dtype} {list(tensor.shape)}, {tensor.nbytes} bytes")
            first = next(lease.tensors())
            if lease.mapping == "private" and first.nbytes:
                first.memoryview()[0] ^= 1
                print(f"copied by this process: {lease.copied_bytes()} bytes")
            lease.verify()
            print("the pool's own bytes: unchanged")
    except resvisor.Error as error:
        print(f"{error.code.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
