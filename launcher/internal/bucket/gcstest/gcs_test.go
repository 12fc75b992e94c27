// Package gcstest tests checkpoints in buckets of Google Cloud Storage with a fake server of it, and whole runs with buckets of that and
// of Azure. It is a module of its own, so that users do not get the server.
package gcstest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fsouza/fake-gcs-server/fakestorage"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/archive/archivetest"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/testkit/azure"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
)

// start starts a server with an empty bucket, for this process and those that it starts.
func start(t *testing.T) *fakestorage.Server {
	t.Helper()
	s, err := fakestorage.NewServerWithOptions(fakestorage.Options{Scheme: "http"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	s.CreateBucketWithOpts(fakestorage.CreateBucketOpts{Name: "runs"})
	t.Setenv("STORAGE_EMULATOR_HOST", strings.TrimPrefix(s.URL(), "http://"))
	return s
}

func open(t *testing.T, text string) archive.Bucket {
	t.Helper()
	b, err := bucket.Open(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBucket(t *testing.T) {
	start(t)
	archivetest.Bucket(t, open(t, "gs://runs/a/b"))
	archivetest.Bucket(t, open(t, "gs://runs"))
	if _, err := open(t, "gs://others/a").List(t.Context(), "claims/"); err == nil || !strings.Contains(err.Error(), "there is no bucket others") {
		t.Error(err)
	}
}

var binaries string

func TestMain(m *testing.M) {
	status := 1
	dir, err := os.MkdirTemp("", "gcstest-*")
	if err == nil {
		binaries = dir
		cmd := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/mlp")
		cmd.Dir, cmd.Stderr = "../../../..", os.Stderr
		err = cmd.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		status = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(status)
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: it did not come", what)
		}
	}
}

// A machine with the run directory is lost. The run is resumed from the bucket elsewhere, under another layout, with the same bits; its
// checkpoints are listed and exported from there.
func TestRunWithoutItsMachine(t *testing.T) {
	start(t)
	t.Setenv("AZURE_STORAGE_ACCOUNT", azure.Account)
	t.Setenv("AZURE_STORAGE_KEY", azure.Key)
	t.Setenv("AZURE_STORAGE_SERVICE_ENDPOINT", azure.Serve(t, "runs").URL)
	cwd := t.TempDir()
	run := func(args ...string) *exec.Cmd {
		cmd := exec.Command(filepath.Join(binaries, "launcher"), args...)
		cmd.Dir = cwd
		return cmd
	}
	done := func(args ...string) string {
		t.Helper()
		out, err := run(args...).CombinedOutput()
		if err != nil {
			t.Fatalf("%q: %v\n%s", args, err, out)
		}
		return string(out)
	}
	summary := func(dir string) (sum rundir.Summary) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(cwd, dir, "summary.json"))
		if err == nil {
			err = json.Unmarshal(text, &sum)
		}
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	program := []string{filepath.Join(binaries, "mlp"), "--steps", "100", "--checkpoint-every", "5"}
	done(append([]string{"run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", "whole"}, program...)...)
	want := summary("whole")
	for scheme, url := range map[string]string{"gs": "gs://runs/a", "azblob": "azblob://runs/a"} {
		lost, found := filepath.Join(cwd, "lost-"+scheme), "found-"+scheme
		cmd := run(append([]string{"run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", lost, "--checkpoints", url, "--keep", "2", "--chaos", "slow:0@1:0.05"}, program...)...)
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
		await(t, "two checkpoints in the bucket", func() bool {
			text, _ := os.ReadFile(filepath.Join(lost, "events.jsonl"))
			return bytes.Count(text, []byte(`"kind":"archived"`)) > 1
		})
		job, err := os.ReadFile(filepath.Join(lost, "job.json"))
		if err != nil || bytes.Contains(job, []byte(azure.Key)) {
			t.Errorf("job.json, %v: %s", err, job)
		}
		cmd.Process.Kill()
		cmd.Wait()
		await(t, "the end of what writes", func() bool { return os.RemoveAll(lost) == nil })
		if strings.Contains(out.String(), azure.Key) {
			t.Errorf("%s", &out)
		}

		done("resume", "--plain", "--workers", "3", "--stages", "2", "--run-dir", found, url)
		if got := summary(found); got.StateSHA256 != want.StateSHA256 || got.ParamsSHA256 != want.ParamsSHA256 || got.Steps != 100 {
			t.Errorf("%s: %+v\nwant %+v", scheme, got, want)
		}
		if list := done("checkpoints", "--check", url); strings.Count(list, "verified") != 2 {
			t.Errorf("%s: %s", scheme, list)
		}
		done("export", "--output", "of-"+scheme, url)
		exported, err := os.ReadFile(filepath.Join(cwd, "of-"+scheme, "model.safetensors"))
		if err != nil {
			t.Fatal(err)
		}
		written, err := os.ReadFile(filepath.Join(cwd, found, "model.safetensors"))
		if err != nil || !bytes.Equal(exported, written) {
			t.Errorf("%s: %v: what is exported is not what the run wrote", scheme, err)
		}
	}
}
