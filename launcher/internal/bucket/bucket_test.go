package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/soliton-train/soliton/internal/store/archive"
	"github.com/soliton-train/soliton/internal/store/archive/archivetest"
	"github.com/soliton-train/soliton/internal/testkit/azure"
	"github.com/soliton-train/soliton/internal/testkit/require"
)

// plain clears what a developer's environment may have for clouds.
func plain(t *testing.T) {
	t.Helper()
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		for _, of := range []string{"AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST"} {
			if strings.HasPrefix(name, of) {
				t.Setenv(name, "")
			}
		}
	}
	t.Setenv("HOME", t.TempDir())
}

func open(t *testing.T, text string) archive.Bucket {
	t.Helper()
	b, err := Open(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestFolder(t *testing.T) {
	archivetest.Bucket(t, open(t, "file://"+filepath.Join(t.TempDir(), "a")))
}

func TestAzure(t *testing.T) {
	plain(t)
	s := azure.Serve(t, "runs")
	t.Setenv("AZURE_STORAGE_ACCOUNT", azure.Account)
	t.Setenv("AZURE_STORAGE_KEY", azure.Key)
	t.Setenv("AZURE_STORAGE_SERVICE_ENDPOINT", s.URL)
	archivetest.Bucket(t, open(t, "azblob://runs/a/b"))
	archivetest.Bucket(t, open(t, "azblob://runs"))
}

// The account that Azurite has.
const (
	azuriteAccount = "devstoreaccount1"
	azuriteKey     = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

// Azurite is Azure's own emulator, which checks signatures: npm install -g azurite.
func TestAzurite(t *testing.T) {
	path, err := exec.LookPath("azurite-blob")
	require.Tool(t, "azurite", err == nil, "no azurite-blob in PATH: npm install -g azurite")
	plain(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().(*net.TCPAddr)
	l.Close()
	cmd := exec.Command(path, "--blobHost", "127.0.0.1", "--blobPort", fmt.Sprint(addr.Port), "--inMemoryPersistence", "--silent", "--skipApiVersionCheck")
	cmd.Dir = t.TempDir()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	t.Setenv("AZURE_STORAGE_CONNECTION_STRING", fmt.Sprintf("DefaultEndpointsProtocol=http;AccountName=%s;AccountKey=%s;BlobEndpoint=http://%s/%[1]s;", azuriteAccount, azuriteKey, addr))
	b := open(t, "azblob://runs/a/b").(*blobs)
	for end := time.Now().Add(time.Minute); ; {
		if _, err = b.client.Create(t.Context(), nil); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	archivetest.Bucket(t, b)
	t.Setenv("AZURE_STORAGE_CONNECTION_STRING", fmt.Sprintf("AccountName=%s;AccountKey=%s;BlobEndpoint=http://%s/%[1]s;", azuriteAccount, azure.Key, addr))
	wantFault(t, "azblob://runs/a", "access is refused (AuthorizationFailure)", azure.Key)
}

// wantFault checks that a list fails with one clear line.
func wantFault(t *testing.T, text, want, secret string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := open(t, text).List(ctx, "claims/")
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: %v, want %s", text, err, want)
		return
	}
	if said := err.Error(); strings.Contains(said, "\n") || len(said) > 400 || secret != "" && strings.Contains(said, secret) {
		t.Errorf("%s: %q", text, said)
	}
}

// Wrong credentials, no credentials, a bucket or server that is not there: a clear line without a secret for each.
func TestFaults(t *testing.T) {
	plain(t)
	var answer atomic.Value
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer.Load().(func(http.ResponseWriter))(w) }))
	defer s.Close()
	says := func(status int, kind, text string) {
		answer.Store(func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", kind)
			w.WriteHeader(status)
			fmt.Fprint(w, text)
		})
	}
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	const secret = "s3cr3t+/="

	t.Setenv("AWS_ACCESS_KEY_ID", "user")
	t.Setenv("AWS_SECRET_ACCESS_KEY", secret)
	s3 := "s3://runs/a?region=us-east-1&endpoint="
	says(403, "application/xml", "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message></Error>")
	wantFault(t, s3+s.URL, "access is refused (SignatureDoesNotMatch): check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", secret)
	says(404, "application/xml", "<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>")
	wantFault(t, s3+s.URL, "there is no bucket runs", secret)
	wantFault(t, s3+"http://"+gone.Addr().String(), "connection refused", secret)

	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", filepath.Join(t.TempDir(), "nothing.json"))
	wantFault(t, "gs://runs/a", "no credentials: set GOOGLE_APPLICATION_CREDENTIALS", "")
	t.Setenv("STORAGE_EMULATOR_HOST", strings.TrimPrefix(s.URL, "http://"))
	says(401, "application/json", `{"error":{"code":401,"message":"Anonymous caller does not have storage.objects.list access","errors":[{"message":"a"},{"message":"b"}]}}`)
	wantFault(t, "gs://runs/a", "access is refused (401 Anonymous caller does not have storage.objects.list access): check GOOGLE_APPLICATION_CREDENTIALS", "")
	says(404, "application/json", `{"error":{"code":404,"message":"The specified bucket does not exist."}}`)
	wantFault(t, "gs://runs/a", "there is no bucket runs", "")
	t.Setenv("STORAGE_EMULATOR_HOST", gone.Addr().String())
	wantFault(t, "gs://runs/a", "connection refused", "")

	cloud := azure.Serve(t, "others")
	at := "&endpoint=" + cloud.URL
	t.Setenv("AZURE_STORAGE_KEY", azure.Key)
	wantFault(t, "azblob://runs/a?account=stranger"+at, "access is refused (AuthenticationFailed): check AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY", azure.Key)
	wantFault(t, "azblob://runs/a?account="+azure.Account+at, "there is no bucket runs", azure.Key)
	t.Setenv("AZURE_STORAGE_KEY", "")
	none := errors.New("DefaultAzureCredential: failed to acquire a token.\nAttempted credentials:\n\tEnvironmentCredential: missing")
	if err := new(blobs).fault("x", none); err.Error() != "no credentials: set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, or give the machine an identity" {
		t.Error(err)
	}
	t.Setenv("AZURE_CLIENT_ID", "id")
	if err := new(blobs).fault("x", none); !strings.HasPrefix(err.Error(), "access is refused (DefaultAzureCredential: failed to acquire a token. Attempted") {
		t.Error(err)
	}
	request := &url.Error{Op: "Get", URL: "https://x/runs?sig=" + secret, Err: io.ErrUnexpectedEOF}
	if err := line(fmt.Errorf("it failed: %w", request)); err.Error() != "unexpected EOF" || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v", err)
	}
	if err := line(errors.New("one\n\ttwo" + strings.Repeat("…", 200))); !strings.HasPrefix(err.Error(), "one two…") || len(err.Error()) > 310 {
		t.Errorf("%q", err)
	}

	for text, want := range map[string]string{
		"azblob://runs/a":                         "set AZURE_STORAGE_ACCOUNT, or give ?account=NAME",
		"azblob://runs/a?endpoint=x":              "endpoint is not the URL of a server",
		"azblob://key@runs/a":                     "credentials in the environment",
		"azblob://runs/a?account=x&sig=" + secret: "sig is not known: behind ? give account=NAME or endpoint=URL",
		"gs://runs/a?x=" + secret:                 "gs:// takes nothing behind ?",
		"s3://":                                   "give s3://BUCKET/RUN",
		"azblob://":                               "give azblob://CONTAINER/RUN",
		"ftp://x/y":                               "ftp:// is not known",
	} {
		if _, err := Open(text); err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
	for _, name := range []string{"AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING"} { // the second one counts before the first
		t.Setenv(name, "no base64: "+secret)
		if _, err := Open("azblob://runs/a?account=x"); err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSecrets(t *testing.T) {
	if got := Secrets("azblob://b/a?x=y"); !slices.Contains(got, "AZURE_STORAGE_KEY") {
		t.Errorf("%q", got)
	}
	for _, text := range []string{"", "folder", "file:///a", "gs://b/a", "s3://b/a"} {
		if got := Secrets(text); len(got) != 0 {
			t.Errorf("%s: %q", text, got)
		}
	}
}

// A file of credentials that is no file, or has no end, is refused by the name of its variable.
func TestCredentialsAreNoFile(t *testing.T) {
	plain(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(t.TempDir(), "long")
	if err := errors.Join(os.WriteFile(long, nil, 0o600), os.Truncate(long, 1<<40)); err != nil {
		t.Fatal(err)
	}
	for variable, target := range map[string]string{
		"GOOGLE_APPLICATION_CREDENTIALS": "gs://runs/a",
		"AWS_SHARED_CREDENTIALS_FILE":    "s3://runs/a?region=us-east-1",
		"AZURE_CLIENT_CERTIFICATE_PATH":  "azblob://runs/a?account=x",
		"AZURE_FEDERATED_TOKEN_FILE":     "azblob://runs/a?account=x",
	} {
		for path, want := range map[string]string{fifo: "not a regular file", "/dev/zero": "not a regular file", long: "has more than 1 MiB"} {
			t.Run(variable+path, func(t *testing.T) {
				t.Setenv(variable, path)
				if _, err := Open(target); err == nil || !strings.Contains(err.Error(), variable+": ") || !strings.Contains(err.Error(), want) {
					t.Errorf("%v, want %s", err, want)
				}
			})
		}
	}
}
