package machines

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/soliton-train/soliton/internal/testkit/require"
)

const sshConfig = "StrictHostKeyChecking yes\nLogLevel ERROR\n"

const sshdConfig = "HostKey /root/.ssh/id_ed25519\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPidFile none\nUsePAM no\n"

// ServeSSH starts sshd on machines, and lets root of each into all of them with one key, which is also that of the hosts. Where there is
// no sshd, it skips the test.
func ServeSSH(t testing.TB, ms []*Machine) {
	t.Helper()
	sshd, err := exec.LookPath("sshd")
	if err != nil {
		sshd = "/usr/sbin/sshd" // which users' PATH may lack
		_, err = os.Stat(sshd)
	}
	_, noClient := exec.LookPath("ssh")
	_, noKeys := exec.LookPath("ssh-keygen")
	err = errors.Join(err, noClient, noKeys)
	require.Tool(t, "ssh", err == nil, fmt.Sprintf("sshd, ssh and ssh-keygen: %v", err))
	key := filepath.Join(t.TempDir(), "id_ed25519")
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", key).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen: %v: %s", err, out)
	}
	private, err1 := os.ReadFile(key)
	public, err2 := os.ReadFile(key + ".pub")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	var known strings.Builder
	for _, m := range ms {
		fmt.Fprintf(&known, "%s,%v %s", m.Name, m.Addr(), public)
	}
	for _, m := range ms {
		folder := m.Path("/root/.ssh")
		err := errors.Join(os.Chmod(m.Path("/root"), 0o700), os.MkdirAll(folder, 0o700), os.MkdirAll(m.Path("/run/sshd"), 0o755))
		for name, text := range map[string][]byte{
			"id_ed25519": private, "authorized_keys": public, "known_hosts": []byte(known.String()), "config": []byte(sshConfig), "sshd_config": []byte(sshdConfig),
		} {
			err = errors.Join(err, os.WriteFile(filepath.Join(folder, name), text, 0o600))
		}
		if err == nil {
			err = m.Command(sshd, "-D", "-f", "/root/.ssh/sshd_config").Start()
		}
		m.report(err)
	}
	for _, m := range ms { // until it listens
		if out, err := m.Command("sh", "-c", "for i in $(seq 100); do ssh -o BatchMode=yes "+m.Name+" true && exit; sleep 0.05; done; exit 1").CombinedOutput(); err != nil {
			t.Fatalf("machine %s: sshd: %v: %s", m.Name, err, out)
		}
	}
}
