"""An ssh server on each of the two nodes, and a client.

The client needs neither a password nor files in the user's home.
"""

import shutil
import subprocess
from pathlib import Path

from nodes import ADDRESSES, HOSTS, need, sh, until

SERVER = """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
PidFile none
StrictModes no
UseDNS no
UsePAM no
LoginGraceTime 0
MaxStartups 100
"""
CLIENT = """\
BatchMode yes
GlobalKnownHostsFile none
IdentitiesOnly yes
IdentityFile {folder}/key
LogLevel ERROR
User root
UserKnownHostsFile {folder}/known_hosts
"""


class Sshd:
    """Servers on the nodes, and the client `command` for them.

    Use it as a context manager, inside the one of Nodes. What a server runs does not have the
    environment of the client. So `nodes.pids` finds it, and Job does not.
    """

    def __init__(self, nodes, folder):
        self.nodes = nodes
        # For keys, settings and the servers' logs. Its path must not contain spaces.
        self.folder = Path(folder)
        self.command = f"ssh -F {self.folder}/config"
        self.servers = []

    def __enter__(self):
        need("ssh", "sshd")
        for name in "host_key", "key":
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"{','.join(HOSTS + ADDRESSES)} {key}")
        (self.folder / "sshd_config").write_text(SERVER.format(folder=self.folder))
        (self.folder / "config").write_text(CLIENT.format(folder=self.folder))
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs it, and only its service creates it
        try:
            for index in range(len(HOSTS)):
                self.start(index)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, index):
        """Start a node's server and wait until it listens."""
        log = self.folder / f"{HOSTS[index]}.log"
        command = [shutil.which("sshd"), "-D", "-e", "-f", self.folder / "sshd_config"]
        command = [*self.nodes.enter(index), *command]
        with log.open("w") as file:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file)
        self.servers.append(server)
        until(lambda: "Server listening on 0.0.0.0" in log.read_text(), log.read_text, 120)

    def __exit__(self, *_):
        for server in self.servers:
            server.kill()  # Nodes ends what it has started
            server.wait()

    def left(self):
        """Return the command lines of processes that stay on the nodes and are no servers."""
        return self.nodes.left([server.pid for server in self.servers])
