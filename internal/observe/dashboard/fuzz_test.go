package dashboard

import (
	"bufio"
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Whatever is asked without the token does nothing and shows nothing of the run; with it, only what is well-formed is done.
func FuzzRequests(f *testing.F) {
	const secret = "gpt-of-this-run"
	for _, text := range []string{
		"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
		"POST /api/act HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nContent-Length: 24\r\n\r\n{\"do\":\"kill\",\"worker\":2}",
		"POST /api/act HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"do\"\r\n0\r\n\r\n",
		"PUT //api/../api/act HTTP/1.0\r\nHost: [::1]:7\r\nOrigin: null\r\n\r\n",
	} {
		f.Add([]byte(text), false)
		f.Add([]byte(text), true)
	}
	s, err := Listen(Config{Addr: "127.0.0.1:0"})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(s.Close)
	run := &fakeRun{watched: make(chan bool, 1<<10)}
	s.Attach(run)
	e := begin()
	e.Job.Program = secret
	s.Show(e)
	handler := s.handler()
	f.Fuzz(func(t *testing.T, text []byte, token bool) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(text)))
		if err != nil {
			return
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a stream ends after its first frame
		r = r.WithContext(ctx)
		if token {
			r.Header.Set("Authorization", "Bearer "+s.token)
		} else if r.Header.Get("Authorization") == "Bearer "+s.token {
			return
		}
		before := len(run.done())
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if !token && (len(run.done()) > before || strings.Contains(w.Body.String(), secret)) {
			t.Fatalf("without the token: status %d, %s", w.Code, w.Body)
		}
		for _, a := range run.done()[before:] {
			if a.fault() != "" {
				t.Fatalf("%+v was done", a)
			}
		}
	})
}
