package main

import (
	"bufio"
	"bytes"
	"flag"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/soliton-train/soliton/internal/observe/dashboard"
)

var screenshots = flag.String("screenshots", "", "run the GPT example, and write a picture of its trace to this `folder`")

// pageArgs make a run that is under way for as long as a browser may need.
var pageArgs = []string{"--steps", "1000000", "--micro-batch", "4", "--eval-every", "0"}

// pageRun is a run with a page.
type pageRun struct {
	*underWay
	url, token string
}

// beginPage starts a run with a page, and returns when it trains.
func beginPage(t *testing.T, program string, args, flags []string, env ...string) *pageRun {
	t.Helper()
	flags = append([]string{"run", "--plain", "--threads", "1", "--run-dir", "run", "--ui=127.0.0.1:0"}, flags...)
	r := &pageRun{underWay: &underWay{t: t, cmd: launch(t, append(append(flags, program), args...)...)}}
	r.dir = filepath.Join(r.cmd.Dir, "run")
	r.cmd.Env = append(os.Environ(), env...)
	out, err := r.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.cmd.Stderr = os.Stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var read sync.WaitGroup
	t.Cleanup(func() { r.cmd.Process.Kill(); read.Wait(); r.cmd.Wait() })
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	read.Go(func() { io.Copy(io.Discard, lines) })
	r.until("start", 1)
	secret, err := os.ReadFile(filepath.Join(r.dir, dashboard.TokenName))
	if err != nil {
		t.Fatal(err)
	}
	r.token = strings.TrimSpace(string(secret))
	if strings.Contains(line, r.token) {
		t.Error("the token is in what --plain prints")
	}
	r.url = strings.Fields(line)[1]
	return r
}

// TestPageProtects shows that what has no token or comes from elsewhere changes nothing.
func TestPageProtects(t *testing.T) {
	r := beginPage(t, mlp, pageArgs, []string{"--workers", "2", "--detect", "10s"})
	post := func(token string, header ...string) int {
		t.Helper()
		req, err := http.NewRequest("POST", r.url+"api/act", bytes.NewReader([]byte(`{"do":"kill","worker":1}`)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+token)
		for i := 0; i < len(header); i += 2 {
			if req.Header.Set(header[i], header[i+1]); header[i] == "Host" {
				req.Host = header[i+1]
			}
		}
		answer, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		return answer.StatusCode
	}
	for _, c := range []struct {
		token  string
		header []string
		status int
	}{
		{"", nil, http.StatusUnauthorized},
		{"wrong", nil, http.StatusUnauthorized},
		{r.token, []string{"Origin", "http://elsewhere.example"}, http.StatusForbidden},
		{r.token, []string{"Sec-Fetch-Site", "cross-site"}, http.StatusForbidden},
		{r.token, []string{"Host", "elsewhere.example"}, http.StatusMisdirectedRequest},
	} {
		if status := post(c.token, c.header...); status != c.status {
			t.Errorf("with token %q and %v: status %d, want %d", c.token, c.header, status, c.status)
		}
	}
	if lost := r.events("lost"); len(lost) != 0 {
		t.Fatalf("a request that is refused has killed: %v", lost)
	}
	if status := post(r.token); status != http.StatusOK {
		t.Errorf("with the token: status %d", status)
	}
	r.until("lost", 1)
	info, err := os.Stat(filepath.Join(r.dir, dashboard.TokenName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the token's file: %v, %v", info, err)
	}
}

// TestPageAddress: a port in use is said in one line, before anything has begun.
func TestPageAddress(t *testing.T) {
	r := beginPage(t, mlp, pageArgs, []string{"--workers", "1"})
	addr := strings.TrimSuffix(strings.TrimPrefix(r.url, "http://"), "/")
	status, _, stderr := result(t, launch(t, "run", "--ui="+addr, mlp))
	if want := "launcher: --ui=" + addr + ": "; status != 1 || !strings.HasPrefix(stderr, want) || strings.Count(stderr, "\n") != 1 {
		t.Errorf("status %d, stderr %q; want one line that begins with %q", status, stderr, want)
	}
}

func buildGPT(t *testing.T) string {
	t.Helper()
	gpt := filepath.Join(t.TempDir(), "gpt")
	if out, err := exec.Command("go", "build", "-o", gpt, "../examples/gpt").CombinedOutput(); err != nil {
		t.Fatalf("%s%v", out, err)
	}
	return gpt
}
