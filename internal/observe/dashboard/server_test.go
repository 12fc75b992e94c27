package dashboard

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeRun notes what is asked for.
type fakeRun struct {
	mu      sync.Mutex
	acts    []Action
	watched chan bool
	block   chan struct{} // where it is not nil, Act waits for its end
	refuse  error
}

func (r *fakeRun) Act(ctx context.Context, a Action) (string, error) {
	r.mu.Lock()
	r.acts = append(r.acts, a)
	r.mu.Unlock()
	if r.block != nil {
		select {
		case <-r.block:
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
	return "done", r.refuse
}

func (r *fakeRun) Watch(on bool) { r.watched <- on }

func (r *fakeRun) done() []Action {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.acts
}

func serve(t *testing.T) (*Server, *fakeRun) {
	t.Helper()
	s, err := Listen(Config{Addr: "127.0.0.1:0", TokenFile: filepath.Join(t.TempDir(), TokenName)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	t.Cleanup(s.Close)
	r := &fakeRun{watched: make(chan bool, 64)}
	s.Attach(r)
	return s, r
}

// ask sends a request and returns the answer and its body.
func ask(t *testing.T, method, url, body string, header ...string) (a answer, text string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		} else {
			req.Header.Set(header[i], header[i+1])
		}
	}
	got, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Body.Close()
	all, err := io.ReadAll(got.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{got.StatusCode, got.Header}, string(all)
}

// answer is what came before the body.
type answer struct {
	StatusCode int
	Header     http.Header
}

func TestFiles(t *testing.T) {
	s, _ := serve(t)
	for path, kind := range map[string]string{
		"/": "text/html", "/style.css": "text/css", "/app.js": "javascript", "/charts.js": "javascript", "/icon.svg": "image/svg+xml",
	} {
		answer, body := ask(t, "GET", s.URL()+path[1:], "")
		h := answer.Header
		if answer.StatusCode != 200 || !strings.Contains(h.Get("Content-Type"), kind) || body == "" {
			t.Errorf("%s: status %d, %s, %d bytes", path, answer.StatusCode, h.Get("Content-Type"), len(body))
		}
		if h.Get("Content-Security-Policy") != policy || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s: headers %v", path, h)
		}
		for _, banned := range []string{"https://", "<style", " style=", "onclick", "eval(", "innerHTML"} {
			if strings.Contains(body, banned) {
				t.Errorf("%s has %s", path, banned)
			}
		}
	}
	if answer, _ := ask(t, "GET", s.URL()+"metrics", ""); answer.StatusCode != http.StatusNotFound {
		t.Errorf("without measures: status %d", answer.StatusCode)
	}
	s.Metrics(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "soliton_steps 3") }))
	if _, body := ask(t, "GET", s.URL()+"metrics", ""); body != "soliton_steps 3\n" {
		t.Errorf("metrics: %q", body)
	}
	for _, path := range []string{"page/index.html", "api/act", "absent", "../server.go"} {
		if answer, _ := ask(t, "GET", s.URL()+path, ""); answer.StatusCode < 400 {
			t.Errorf("GET %s: status %d", path, answer.StatusCode)
		}
	}
}

func TestActions(t *testing.T) {
	s, r := serve(t)
	auth := []string{"Authorization", "Bearer " + s.token}
	kill := `{"do":"kill","worker":2}`
	for _, c := range []struct {
		name   string
		body   string
		header []string
		status int
	}{
		{"no token", kill, nil, 401},
		{"another token", kill, []string{"Authorization", "Bearer " + strings.Repeat("a", len(s.token))}, 401},
		{"an empty token", kill, []string{"Authorization", "Bearer "}, 401},
		{"the token as another scheme", kill, []string{"Authorization", "Basic " + s.token}, 401},
		{"another origin", kill, append(auth, "Origin", "http://elsewhere.example"), 403},
		{"another port", kill, append(auth, "Origin", "http://127.0.0.1:1"), 403},
		{"no origin at all", kill, append(auth, "Origin", "null"), 403},
		{"another site", kill, append(auth, "Sec-Fetch-Site", "cross-site"), 403},
		{"a sibling", kill, append(auth, "Sec-Fetch-Site", "same-site"), 403},
		{"a name that was made to point here", kill, append(auth, "Host", "elsewhere.example"), 421},
		{"the same, with its origin", kill, append(auth, "Host", "elsewhere.example:80", "Origin", "http://elsewhere.example:80"), 421},
		{"no JSON", "kill", auth, 400},
		{"too much", `{"do":"` + strings.Repeat("x", maxBody) + `"}`, auth, 400},
		{"unknown fields", `{"do":"kill","pid":1}`, auth, 400},
		{"unknown action", `{"do":"fly"}`, auth, 400},
		{"no worker", `{"do":"kill","worker":-1}`, auth, 400},
		{"no speed", `{"do":"slow","worker":1}`, auth, 400},
		{"too fast", `{"do":"slow","worker":1,"factor":1.5}`, auth, 400},
	} {
		if answer, _ := ask(t, "POST", s.URL()+"api/act", c.body, c.header...); answer.StatusCode != c.status {
			t.Errorf("%s: status %d, want %d", c.name, answer.StatusCode, c.status)
		}
	}
	if acts := r.done(); len(acts) > 0 {
		t.Fatalf("requests that were refused did %v", acts)
	}
	origin := strings.TrimSuffix(s.URL(), "/")
	answer, body := ask(t, "POST", s.URL()+"api/act", kill, append(auth, "Origin", origin, "Sec-Fetch-Site", "same-origin")...)
	if answer.StatusCode != 200 || body != "{\"said\":\"done\"}\n" || len(r.done()) != 1 || r.done()[0] != (Action{Do: "kill", Worker: 2}) {
		t.Errorf("status %d, %s, did %v", answer.StatusCode, body, r.done())
	}
	r.refuse = errors.New("there is no worker 2")
	if answer, body := ask(t, "POST", s.URL()+"api/act", kill, auth...); answer.StatusCode != 409 || !strings.Contains(body, "there is no worker 2") {
		t.Errorf("status %d, %s", answer.StatusCode, body)
	}
}

func TestActionsAtATime(t *testing.T) {
	s, r := serve(t)
	r.block = make(chan struct{})
	var asked sync.WaitGroup
	statuses := make(chan int, maxActions+1)
	for range maxActions + 1 {
		asked.Go(func() {
			answer, _ := ask(t, "POST", s.URL()+"api/act", `{"do":"add"}`, "Authorization", "Bearer "+s.token)
			statuses <- answer.StatusCode
		})
	}
	if first := <-statuses; first != http.StatusTooManyRequests { // the others wait
		t.Errorf("status %d of the first that was answered", first)
	}
	close(r.block)
	asked.Wait()
	for range maxActions {
		if status := <-statuses; status != 200 {
			t.Errorf("status %d", status)
		}
	}
}

func TestNames(t *testing.T) {
	s, _ := serve(t)
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"localhost": true, "LOCALHOST:7070": true, "127.0.0.1:7070": true, "[::1]:7070": true, "10.1.2.3": true, name: true,
		"": false, "elsewhere.example": false, "localhost.elsewhere.example:80": false, "127.0.0.1.elsewhere.example": false, ":7070": false,
	} {
		if s.ours(host) != want {
			t.Errorf("%q: %v", host, !want)
		}
	}
}

func TestToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), TokenName)
	if err := os.WriteFile(file, []byte("of a run that was killed"), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err := Listen(Config{Addr: "127.0.0.1:0", TokenFile: file})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	text, err := os.ReadFile(file)
	if err != nil || string(text) != s.token+"\n" || len(s.token) != 43 {
		t.Errorf("%q, %v", text, err)
	}
	if strings.Contains(s.URL(), s.token) || s.Link() != s.URL()+"#"+s.token {
		t.Error(s.URL(), s.Link())
	}
	s.Close()
	if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

func TestAddress(t *testing.T) {
	s, _ := serve(t)
	taken := s.addr.String()
	for _, addr := range []string{taken, "nowhere", "127.0.0.1:x", "256.1.1.1:80"} {
		_, err := Listen(Config{Addr: addr})
		var wrong *AddrError
		if !errors.As(err, &wrong) || strings.Count(err.Error(), addr) > 1 && addr != "256.1.1.1:80" && addr != taken || !strings.HasPrefix(err.Error(), "--ui="+addr+": ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", addr, err)
		}
	}
	if s.Beyond() {
		t.Error("loopback is beyond this machine")
	}
}

// stream is a page that listens.
type stream struct {
	t      *testing.T
	answer *http.Response
	lines  *bufio.Reader
}

func listen(t *testing.T, s *Server) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, "GET", s.URL()+"api/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	answer, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); answer.Body.Close() })
	return &stream{t, answer, bufio.NewReader(answer.Body)}
}

// next returns the next frame; nil at the end.
func (p *stream) next() *frame {
	p.t.Helper()
	for {
		line, err := p.lines.ReadBytes('\n')
		if err != nil {
			return nil
		}
		if text, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			f := new(frame)
			if err := json.Unmarshal(text, f); err != nil {
				p.t.Fatal(err)
			}
			return f
		}
	}
}

func TestEvents(t *testing.T) {
	s, r := serve(t)
	p := listen(t, s)
	if f := p.next(); f.Run == nil || f.Run.State != starting || !f.Run.Acts || !f.Reset {
		t.Fatalf("the first frame is %+v", f)
	}
	if !<-r.watched {
		t.Error("the run was not told of the page")
	}
	s.Show(begin())
	f := p.next()
	if f.Run == nil || f.Run.State != training || len(f.Workers) != 3 || f.Reset {
		t.Errorf("after the beginning: %+v", f)
	}
	s.Show(step(1, 4))
	if f = p.next(); len(f.Points) != 1 || f.Workers != nil || f.Run.Step != 1 {
		t.Errorf("after a step: %+v", f)
	}
	late := listen(t, s)
	if f := late.next(); len(f.Points) != 1 || len(f.Workers) != 3 || !f.Reset {
		t.Errorf("a page that comes late gets %+v", f)
	}
	// The end comes to all, though they have just been told something, and ends the streams.
	s.Show(step(2, 3))
	s.Show(end(2))
	s.Close()
	for _, p := range []*stream{p, late} {
		var last *frame
		for f := p.next(); f != nil; f = p.next() {
			last = f
		}
		if last == nil || last.Run == nil || last.Run.State != done || last.Run.Acts {
			t.Errorf("the last frame is %+v", last)
		}
	}
	if <-r.watched {
		t.Error("the run was told of a page again")
	}
	s.Show(step(3, 1)) // nothing happens
}

func TestPagesAtATime(t *testing.T) {
	s, r := serve(t)
	var all []*stream
	for range maxPages {
		p := listen(t, s)
		p.next()
		all = append(all, p)
	}
	if answer, _ := ask(t, "GET", s.URL()+"api/events", "", "Authorization", "Bearer "+s.token); answer.StatusCode != http.StatusServiceUnavailable || answer.Header.Get("Retry-After") == "" {
		t.Errorf("one more gets status %d", answer.StatusCode)
	}
	for _, p := range all {
		p.answer.Body.Close()
	}
	if on, off := <-r.watched, <-r.watched; !on || off {
		t.Errorf("the run was told %v, then %v", on, off)
	}
}

// Streams without the token take no place of a page that has it.
func TestStreamsNeedToken(t *testing.T) {
	s, _ := serve(t)
	for range maxPages + 1 {
		req, err := http.NewRequestWithContext(t.Context(), "GET", s.URL()+"api/events", nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if answer.StatusCode != http.StatusUnauthorized {
			t.Errorf("without the token: status %d", answer.StatusCode)
		}
	}
	if p := listen(t, s); p.answer.StatusCode != http.StatusOK || p.next() == nil {
		t.Errorf("the page's owner gets status %d", p.answer.StatusCode)
	}
}

// TestClose ends what is under way.
// Connections without the token are bounded: the oldest make room, and pages with the token stay and come.
func TestConnectionsWithoutToken(t *testing.T) {
	s, _ := serve(t)
	page := listen(t, s)
	page.next()
	var silent []net.Conn
	for range 2 * maxUnproven {
		c, err := net.Dial("tcp", s.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	for i, c := range silent[:maxUnproven] {
		_ = c.SetReadDeadline(time.Now().Add(readTime / 2))
		if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d of %d stays", i, len(silent))
		}
	}
	s.Show(step(1, 2))
	page.next()
	listen(t, s).next()
}

func TestClose(t *testing.T) {
	s, r := serve(t)
	r.block = make(chan struct{})
	defer close(r.block)
	answered := make(chan int)
	go func() {
		answer, err := http.DefaultClient.Do(must(http.NewRequest("POST", s.URL()+"api/act", strings.NewReader(`{"do":"add"}`)))(s))
		if err != nil {
			answered <- 0
			return
		}
		answer.Body.Close()
		answered <- answer.StatusCode
	}()
	for len(s.acts) == 0 { // it is under way
		ask(t, "GET", s.URL(), "")
	}
	s.Close()
	s.Close()
	if status := <-answered; status == 200 {
		t.Error("it was done")
	}
}

func must(req *http.Request, err error) func(*Server) *http.Request {
	if err != nil {
		panic(err)
	}
	return func(s *Server) *http.Request {
		req.Header.Set("Authorization", "Bearer "+s.token)
		return req
	}
}
