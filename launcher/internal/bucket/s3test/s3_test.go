// Package s3test tests checkpoints in buckets with a real S3 server, Versity's gateway. It is a module of its own, so that users do not
// get that.
package s3test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/archive/archivetest"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/bucket"
)

const (
	serveEnv = "S3TEST_SERVE" // "ADDRESS FOLDER": this process is the server
	access   = "user"
	secret   = "secret-of-user"
)

func TestMain(m *testing.M) {
	if at := os.Getenv(serveEnv); at != "" {
		serve(at)
	}
	os.Setenv("AWS_ACCESS_KEY_ID", access)
	os.Setenv("AWS_SECRET_ACCESS_KEY", secret)
	os.Exit(m.Run())
}

func serve(at string) {
	addr, folder, _ := strings.Cut(at, " ")
	be, err := posix.New(folder, meta.XattrMeta{}, posix.PosixOpts{})
	if err == nil {
		err = embedgw.RunVersityGW(context.Background(), be, &embedgw.Config{
			RootUserAccess: access, RootUserSecret: secret, Region: "us-east-1", Ports: []string{addr},
			MaxConnections: 64, MaxRequests: 64, MultipartMaxParts: 10000, Quiet: true,
		})
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// server is a process that serves S3.
type server struct {
	t      testing.TB
	addr   string
	folder string
	cmd    *exec.Cmd
	used   time.Duration // of a processor, by processes that were killed
}

// start starts a server, whose objects are in a folder of their own.
func start(t testing.TB) *server { return startIn(t, t.TempDir()) }

// startIn starts one whose objects are in a folder that is there.
func startIn(t testing.TB, folder string) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, addr: l.Addr().String(), folder: folder}
	l.Close()
	if err := syscall.Setxattr(s.folder, "user.test", []byte("x"), 0); err != nil {
		t.Skipf("%s has no extended attributes: set TMPDIR to a file system with them", s.folder)
	}
	s.begin()
	client, err := minio.New(s.addr, &minio.Options{Creds: credentials.NewStaticV4(access, secret, ""), Region: "us-east-1"})
	if err != nil {
		t.Fatal(err)
	}
	s.await("the server", func() bool {
		return client.MakeBucket(t.Context(), "runs", minio.MakeBucketOptions{}) == nil
	})
	return s
}

func (s *server) begin() {
	s.cmd = exec.Command(os.Args[0])
	s.cmd.Env = append(os.Environ(), serveEnv+"="+s.addr+" "+s.folder)
	s.cmd.Stderr = os.Stderr
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd := s.cmd
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
}

func (s *server) kill() {
	s.cmd.Process.Kill()
	if s.cmd.Wait(); s.cmd.ProcessState != nil {
		s.used += s.cmd.ProcessState.UserTime() + s.cmd.ProcessState.SystemTime()
	}
}

func (s *server) await(what string, ok func() bool) {
	s.t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("%s: it did not come", what)
		}
	}
}

func (s *server) url(run string) string {
	return "s3://runs/" + run + "?region=us-east-1&endpoint=http://" + s.addr
}

func (s *server) open(run string) archive.Bucket {
	s.t.Helper()
	b, err := bucket.Open(s.url(run))
	if err != nil {
		s.t.Fatal(err)
	}
	return b
}

// The server does what an archive relies on.
func TestBucket(t *testing.T) {
	archivetest.Bucket(t, start(t).open("a/b"))
}

// Wrong keys and a bucket that is not there are one clear line each.
func TestFaults(t *testing.T) {
	s := start(t)
	for want, text := range map[string]string{"there is no bucket others": strings.Replace(s.url("a"), "runs", "others", 1), "access is refused (": s.url("a")} {
		if strings.HasPrefix(want, "access") {
			t.Setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
		}
		b, err := bucket.Open(text)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.List(t.Context(), "claims/"); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v, want %s", err, want)
		}
		os.Setenv("AWS_SECRET_ACCESS_KEY", secret)
	}
}

var root = "../../../.."

// build builds the launcher and an example.
func build(t testing.TB, example string) (launcher, program string) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command("go", "build", "-o", dir+"/", "./launcher", "./examples/"+example)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "launcher"), filepath.Join(dir, example)
}

func summary(t *testing.T, dir string) (sum rundir.Summary) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "summary.json"))
	if err == nil {
		err = json.Unmarshal(text, &sum)
	}
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// A run whose server is killed in the middle, frozen and started again goes on, and its newest whole checkpoint is found. All processes
// and the run directory are lost then: the run is resumed from the bucket on another machine, under another layout, with the same bits.
func TestRunWithoutItsMachine(t *testing.T) {
	s := start(t)
	launcher, mlp := build(t, "mlp")
	cwd := t.TempDir()
	run := func(args ...string) *exec.Cmd {
		cmd := exec.Command(launcher, args...)
		cmd.Dir = cwd
		return cmd
	}
	const all = 3000 // which take longer, slowed as below, than all that happens to the server
	steps := []string{mlp, "--steps", fmt.Sprint(all), "--checkpoint-every", "10"}
	if out, err := run(append([]string{"run", "--plain", "--workers", "1", "--threads", "1", "--run-dir", "whole"}, steps...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := summary(t, filepath.Join(cwd, "whole"))

	cmd := run(append([]string{"run", "--plain", "--workers", "2", "--threads", "1", "--run-dir", "lost", "--checkpoints", s.url("a"), "--chaos", "slow:0@1:0.03"}, steps...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	events := func(kind string) int {
		text, _ := os.ReadFile(filepath.Join(cwd, "lost", "events.jsonl"))
		return strings.Count(string(text), `"kind":"`+kind+`"`)
	}
	s.await("a checkpoint in the bucket", func() bool { return events("archived") > 0 })
	s.kill()
	s.await("an event with the cause", func() bool { return events("unarchived") > 0 })
	s.begin()
	before := events("archived")
	s.await("another checkpoint", func() bool { return events("archived") > before })
	if err := s.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	made := events("checkpoint")
	s.await("checkpoints in the run directory while the server does not answer", func() bool { return events("checkpoint") > made+1 })
	if err := s.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	s.await("the end of what writes", func() bool { return os.RemoveAll(filepath.Join(cwd, "lost")) == nil })

	text, err := run("resume", "--plain", "--workers", "3", "--stages", "2", "--run-dir", "found", s.url("a")).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if got := summary(t, filepath.Join(cwd, "found")); got.StateSHA256 != want.StateSHA256 || got.ParamsSHA256 != want.ParamsSHA256 || got.Steps != all {
		t.Errorf("%+v\nwant %+v\n%s", got, want, text)
	}
	metrics, err := os.ReadFile(filepath.Join(cwd, "found", "metrics.jsonl"))
	if n := bytes.Count(metrics, []byte("\n")); err != nil || n == 0 || n >= all {
		t.Errorf("%d steps were run again, %v", n, err)
	}
}
