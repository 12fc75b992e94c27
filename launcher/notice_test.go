package main

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
)

// A notice that the machine is taken away ends a run on one machine with a checkpoint, from which it can be resumed.
func TestNotice(t *testing.T) {
	built(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "run")
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		text := "FALSE"
		if all, err := filepath.Glob(filepath.Join(dir, "workers.json")); err == nil && len(all) > 0 {
			text = "TRUE"
		}
		_, _ = w.Write([]byte(text))
	}))
	defer server.Close()
	status, stdout, stderr := result(t, launch(t, "run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", dir,
		"--notice", server.URL+"/computeMetadata/v1/instance/preempted", mlp, "--steps", "1000000"))
	if status != 75 || !strings.Contains(stdout+stderr, "Google Cloud preempts this machine") {
		t.Errorf("status %d\n%s%s", status, stdout, stderr)
	}
	if status, stdout, stderr := result(t, launch(t, "run", "--notice", "http://x/", mlp)); status != 2 || !strings.Contains(stderr, "--notice") {
		t.Errorf("status %d\n%s%s", status, stdout, stderr)
	}
}
