"""``python -m llamacppshim``: what this build is."""

from llamacppshim import build_info


def main() -> None:
    for name, value in build_info().items():
        if isinstance(value, dict):
            value = " ".join(f"{key}={word}" for key, word in value.items())
        elif isinstance(value, list):
            value = " ".join(value)
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
