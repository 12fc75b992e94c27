package notice

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Each cloud's answers, as their documentation has them.
func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		name, path  string
		header      string // that the server wants
		status      int
		body        string
		want, wrong string
	}{
		{"aws nothing", awsPath, "X-aws-ec2-metadata-token", 404, "", "", ""},
		{"aws", awsPath, "X-aws-ec2-metadata-token", 200, `{"action": "terminate", "time": "2026-09-18T08:22:00Z"}`, "AWS is to terminate this instance at 2026-09-18T08:22:00Z", ""},
		{"aws without tokens", awsPath, "", 200, `{"action": "stop", "time": "2026-09-18T08:22:00Z"}`, "AWS is to stop this instance at 2026-09-18T08:22:00Z", ""},
		{"aws ill", awsPath, "", 500, "", "", "status 500"},
		{"aws other", awsPath, "", 200, "<html>", "", "does not answer with an action"},
		{"gcp nothing", gcpPath, "Metadata-Flavor", 200, "FALSE", "", ""},
		{"gcp", gcpPath, "Metadata-Flavor", 200, "TRUE\n", "Google Cloud preempts this machine", ""},
		{"gcp other", gcpPath, "Metadata-Flavor", 200, "maybe", "", "not TRUE or FALSE"},
		{"azure nothing", azurePath, "Metadata", 200, `{"DocumentIncarnation":1,"Events":[]}`, "", ""},
		{"azure reboot", azurePath, "Metadata", 200, `{"Events":[{"EventType":"Reboot"}]}`, "", ""},
		{"azure", azurePath, "Metadata", 200, `{"Events":[{"EventType":"Freeze"},{"EventType":"Preempt","NotBefore":"Mon, 19 Sep 2026 18:29:47 GMT"}]}`, "Azure is to preempt this machine at Mon, 19 Sep 2026 18:29:47 GMT", ""},
		{"azure other", azurePath, "Metadata", 200, `[`, "", "does not answer with events"},
		{"long", gcpPath, "", 200, strings.Repeat("x", 1<<20), "", "not TRUE or FALSE"},
		{"elsewhere", gcpPath, "", 302, "", "", "status 302"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch {
				case r.URL.Path == awsToken && c.header != "":
					if r.Method != http.MethodPut || r.Header.Get("X-aws-ec2-metadata-token-ttl-seconds") == "" {
						w.WriteHeader(400)
					}
					_, _ = w.Write([]byte("a token"))
				case r.URL.Path != c.path || c.header != "" && r.Header.Get(c.header) == "":
					w.WriteHeader(401)
				default:
					if c.status == 302 {
						w.Header().Set("Location", "/other")
					}
					w.WriteHeader(c.status)
					_, _ = w.Write([]byte(c.body))
				}
			}))
			defer server.Close()
			s, err := Parse(server.URL + c.path)
			if err != nil {
				t.Fatal(err)
			}
			defer s.http.CloseIdleConnections()
			got, err := s.ask(t.Context(), s)
			if got != c.want || (err == nil) != (c.wrong == "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%q, %v; want %q, %q", got, err, c.want, c.wrong)
			}
		})
	}
}

// A server is asked until it has a notice, also if it does not answer at first.
func TestWatch(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		switch asked.Add(1) {
		case 1:
			w.WriteHeader(503)
		default:
			_, _ = w.Write([]byte("TRUE"))
		}
	}))
	defer server.Close()
	s, err := Parse(server.URL + gcpPath)
	if err != nil {
		t.Fatal(err)
	}
	said, came := make(chan string, 9), make(chan string, 9)
	end := s.Begin(t.Context(), func(text string) { said <- text }, func(text string) { came <- text })
	if text := <-came; text != "Google Cloud preempts this machine" || !strings.Contains(<-said, "status 503") {
		t.Errorf("%q", text)
	}
	end()
	ctx, cancel := context.WithCancel(t.Context())
	asked.Store(-1 << 20)
	end = s.Begin(ctx, func(string) {}, func(text string) { t.Errorf("%q", text) })
	cancel()
	end()
}

func TestParse(t *testing.T) {
	for _, text := range []string{"aws", "gcp", "azure", "http://127.0.0.1:1338" + awsPath} {
		if _, err := Parse(text); err != nil {
			t.Error(err)
		}
	}
	for _, text := range []string{"", "alibaba", "ftp://x" + awsPath, "http://x/", "http://", "%"} {
		if _, err := Parse(text); err == nil || !strings.HasPrefix(err.Error(), "--notice ") {
			t.Errorf("%q: %v", text, err)
		}
	}
}
