"""A node's configuration: where it comes from, and that every mistake names its key."""

from pathlib import Path

import pytest

from holdfast.client.protocol.errors import BadValue
from holdfast.cluster.config import KEYS, Address, Config, load


def test_a_node_alone_needs_no_configuration() -> None:
    config = load({}, {})
    assert (config.node, str(config.listen), config.others, config.fsync) == ("n1", "127.0.0.1:7401", {}, "always")


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('node = "file"\ndata = "from-file"\nlisten = "127.0.0.1:1"\nkeep_log = true\n')
    environment = {"HOLDFAST_NODE": "environment", "HOLDFAST_LISTEN": "127.0.0.1:2", "HOLDFAST_OTHER": "ignored"}
    config = load({"node": "flag"}, environment, file)
    assert (config.node, str(config.listen), str(config.data)) == ("flag", "127.0.0.1:2", "from-file")
    assert config.keep_log


def test_all_nodes_may_have_the_same_list_of_peers(tmp_path: Path) -> None:
    peers = "n1=127.0.0.1:7421, n2=127.0.0.1:7422,n3=[::1]:7423"
    config = load({"node": "n2", "peers": peers, "secret_file": "s"}, {})
    assert config.others == {"n1": Address("127.0.0.1", 7421), "n3": Address("::1", 7423)}


def test_peers_may_stand_in_the_file_as_a_table(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text('secret_file = "s"\n[peers]\nn2 = "127.0.0.1:7422"\n')
    assert load({}, {}, file).others == {"n2": Address("127.0.0.1", 7422)}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ({"colour": "blue"}, "colour"),
        ({"listen": "7401"}, "listen"),
        ({"listen": "127.0.0.1:70000"}, "listen"),
        ({"listen": "::1:7401"}, "listen"),
        ({"listen": "127.0.0.1:７４０１"}, "listen"),
        ({"peers": "n2=☃.net:7422", "secret_file": "s"}, "peers"),
        ({"peers": "n2=a\0b:7422", "secret_file": "s"}, "peers"),
        ({"max_connections": "0"}, "max_connections"),
        ({"max_connections": "65537"}, "max_connections"),
        ({"peers": "127.0.0.1:7422", "secret_file": "s"}, "peers"),
        ({"peers": "n2=127.0.0.1:1,n2=127.0.0.1:2", "secret_file": "s"}, "peers"),
        ({"peers": "n 2=127.0.0.1:1", "secret_file": "s"}, "peers"),
        ({"peers": ",".join(f"p{at}=127.0.0.1:1" for at in range(9)), "secret_file": "s"}, "peers"),
        ({"peers": "n2=127.0.0.1:1"}, "secret_file"),
        ({"node": ""}, "node"),
        ({"node": "../n1"}, "node"),
        ({"fsync": "never"}, "fsync"),
        ({"keep_log": "perhaps"}, "keep_log"),
        ({"data": ""}, "data"),
    ],
)
def test_a_mistake_names_its_key(flags: dict[str, str], key: str) -> None:
    with pytest.raises(BadValue) as caught:
        load(flags, {})
    assert caught.value.facts["field"] == key


@pytest.mark.parametrize("text", ["node =", "node = 7", "[peers]\nn2 = 7\n"])
def test_a_mistake_in_the_file_names_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text(text)
    with pytest.raises(BadValue, match=r"holdfast\.toml"):
        load({}, {}, file)


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="cannot be read"):
        load({}, {}, tmp_path / "none.toml")


@pytest.mark.parametrize("key", ["listen", "peer_listen", "http"])
@pytest.mark.parametrize("host", ["0.0.0.0", "198.18.0.1", "broker.example", "[::]"])
def test_beyond_loopback_a_node_listens_only_if_told_so(key: str, host: str) -> None:
    with pytest.raises(BadValue, match="insecure-plaintext"):
        load({key: f"{host}:7401"}, {})
    assert load({key: f"{host}:7401", "insecure_plaintext": "true"}, {}).insecure_plaintext


def test_loopback_has_several_names() -> None:
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]"):
        load({"listen": f"{host}:7401"}, {})


def test_the_secret_is_read_and_must_be_long_and_private(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    file.chmod(0o600)
    config = Config(secret_file=file)
    assert config.secret() == b"0123456789abcdef"
    file.chmod(0o640)
    with pytest.raises(BadValue, match="chmod 600"):
        config.secret()
    file.chmod(0o600)
    file.write_bytes(b"short\n")
    with pytest.raises(BadValue, match="5 bytes"):
        config.secret()
    file.unlink()
    with pytest.raises(BadValue, match="cannot be read"):
        config.secret()


def test_every_key_can_be_given_as_a_flag() -> None:
    values = {
        "node": "n1",
        "data": "d",
        "listen": "127.0.0.1:1",
        "peer_listen": "127.0.0.1:2",
        "peers": "",
        "secret_file": "s",
        "http": "127.0.0.1:3",
        "fsync": "os",
        "max_connections": "1",
        "disk_reserve_bytes": "1",
        "keep_log": "yes",
        "trace": "t",
        "insecure_plaintext": "no",
    }
    assert values.keys() == KEYS
    load(values, {})
