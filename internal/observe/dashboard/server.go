package dashboard

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/subtle"
	"embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/observe/view"
)

// DefaultAddr is the default address of the page.
const DefaultAddr = "127.0.0.1:7070"

// TokenName is the name of the token's file in a run directory.
const TokenName = "ui-token"

// Config says where the page is, and what it may do.
type Config struct {
	// Addr is the address to listen on, host:port; "" means DefaultAddr.
	Addr string

	// TokenFile is where the token is written, for its owner only, until Close; "" writes none,
	// and Link is the only way to it.
	TokenFile string
}

// Run is a run that pages act on. Its methods may be called from any goroutine.
type Run interface {
	// Act does what a page asks for, and says what it did. Its error is for people to read.
	Act(ctx context.Context, a Action) (said string, err error)

	// Watch reports whether any page is open.
	Watch(on bool)
}

// Action is what a page asks for.
type Action struct {
	Do     string  `json:"do"`     // kill, freeze, thaw, slow, leave, add or stop
	Worker int     `json:"worker"` // to which; not for add and stop
	Factor float64 `json:"factor"` // of slow: the share of its speed that is left, above 0 to 1
}

// Bounds of what others can make the server hold.
const (
	maxBody    = 4 << 10
	maxHeader  = 16 << 10
	maxPages   = 16 // that listen at a time
	maxActions = 8  // under way at a time

	maxUnproven = 256 // connections that have not shown the token

	readTime  = 5 * time.Second
	actTime   = 10 * time.Second
	writeTime = 5 * time.Second
	idleTime  = time.Minute
	closeTime = 2 * time.Second // for all pages to hear the last

	frameEvery = 100 * time.Millisecond
	aliveEvery = 15 * time.Second
)

// AddrError says that an address cannot be listened on.
type AddrError struct {
	Addr string
	Err  error
}

func (e *AddrError) Error() string {
	var op *net.OpError
	var malformed *net.AddrError
	err := e.Err
	if errors.As(err, &op) {
		err = op.Err
	}
	if errors.As(err, &malformed) {
		err = errors.New(malformed.Err)
	}
	return fmt.Sprintf("--ui=%s: %.200v; give an address that is free, such as --ui=127.0.0.1:0", faults.Value(e.Addr), err)
}

func (e *AddrError) Unwrap() error { return e.Err }

// Server serves the page of one run. It is a [view.View].
type Server struct {
	cfg   Config
	http  *http.Server
	addr  net.Addr
	token string
	hosts []string // names that requests may give this machine, beside literal addresses
	acts  chan struct{}

	unproven *auth.Lobby

	served sync.WaitGroup
	ctx    context.Context // of every request; ends with Close
	cancel context.CancelFunc

	mu      sync.Mutex
	board   board
	changed chan struct{} // closed with the next change
	pages   int
	run     Run
	metrics http.Handler
	closed  bool
	end     chan struct{} // closed by Close

	watching sync.Mutex // held while Watch is called
	watched  bool       // as it was told
}

var _ view.View = (*Server)(nil)

// Listen begins to serve the page. The error is an [AddrError], or that of the token's file.
func Listen(cfg Config) (*Server, error) {
	cfg.Addr = cmp.Or(cfg.Addr, DefaultAddr)
	secret := make([]byte, 32)
	rand.Read(secret) //nolint:errcheck // it never fails
	s := &Server{
		cfg: cfg, token: base64.RawURLEncoding.EncodeToString(secret), board: newBoard(),
		changed: make(chan struct{}), end: make(chan struct{}), acts: make(chan struct{}, maxActions), unproven: auth.NewLobby(maxUnproven),
	}
	host, _, err := net.SplitHostPort(cfg.Addr)
	if err != nil {
		return nil, &AddrError{cfg.Addr, err}
	}
	s.hosts = append(s.hosts, "localhost", strings.ToLower(host))
	if name, err := os.Hostname(); err == nil {
		s.hosts = append(s.hosts, strings.ToLower(name))
	}
	l, err := net.Listen("tcp", cfg.Addr)
	if err != nil {
		return nil, &AddrError{cfg.Addr, err}
	}
	s.addr = l.Addr()
	if cfg.TokenFile != "" {
		if err := writeSecret(cfg.TokenFile, s.token); err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("the page's token: %w", err)
		}
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.http = &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: actTime + writeTime,
		IdleTimeout: idleTime, MaxHeaderBytes: maxHeader, ErrorLog: quiet,
		BaseContext: func(net.Listener) context.Context { return s.ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState: func(c net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				s.unproven.Enter(c)
			case http.StateClosed, http.StateHijacked:
				s.unproven.Leave(c)
			}
		},
	}
	s.served.Go(func() { _ = s.http.Serve(l) })
	return s, nil
}

// quiet drops what the HTTP server says of broken connections: it would spoil the terminal's view.
var quiet = log.New(io.Discard, "", 0)

// writeSecret writes a file that only its owner can read. One that a killed run has left is in the way.
func writeSecret(path, secret string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(secret + "\n")
	return errors.Join(err, f.Close())
}

// URL is where the page is, without the token.
func (s *Server) URL() string { return "http://" + s.addr.String() + "/" }

// Link is the address with the token, which allows seeing the run and acting on it. It must not reach any file or log.
func (s *Server) Link() string { return s.URL() + "#" + s.token }

// Beyond reports whether other machines can reach the page.
func (s *Server) Beyond() bool {
	a, ok := s.addr.(*net.TCPAddr)
	return !ok || !a.IP.IsLoopback()
}

// Attach sets the run that pages act on.
func (s *Server) Attach(r Run) {
	s.mu.Lock()
	s.run = r
	s.board.run.Acts = true
	s.board.at.run++
	s.wake()
	s.mu.Unlock()
	s.tellWatch()
}

// Metrics says what is served at /metrics; before, there is nothing.
func (s *Server) Metrics(h http.Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.metrics = h
}

// wake tells all pages that there is news. s.mu is held.
func (s *Server) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Show implements [view.View].
func (s *Server) Show(e view.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.board.add(time.Now(), e)
		s.wake()
	}
}

// Close implements [view.View].
func (s *Server) Close() {
	s.mu.Lock()
	was := s.closed
	s.closed = true
	s.mu.Unlock()
	if was {
		s.served.Wait()
		return
	}
	close(s.end)
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	if s.http.Shutdown(ctx) != nil {
		s.cancel()
		_ = s.http.Close()
	}
	s.cancel()
	s.served.Wait()
	if s.cfg.TokenFile != "" {
		_ = os.Remove(s.cfg.TokenFile) // it opens nothing any more
	}
}

//go:embed page
var files embed.FS

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	page, err := fs.Sub(files, "page")
	if err != nil {
		panic(err) // the folder is not in the binary
	}
	mux.Handle("GET /", http.FileServerFS(page))
	mux.HandleFunc("GET /api/events", s.events)
	mux.HandleFunc("POST /api/act", s.act)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		metrics := s.metrics
		s.mu.Unlock()
		if metrics == nil {
			http.NotFound(w, r)
			return
		}
		metrics.ServeHTTP(w, r)
	})
	return s.named(secured(http.NewCrossOriginProtection().Handler(mux)))
}

// policy lets the page load its own files and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// named passes only requests that name the server by a name of this machine: another name that resolves to
// this address belongs to a foreign page, which browsers would take for ours.
func (s *Server) named(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.ours(r.Host) {
			http.Error(w, "this server goes by another name", http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) ours(hostport string) bool {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		host = strings.Trim(hostport, "[]")
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return true // an address cannot be made to resolve elsewhere
	}
	return host != "" && slices.Contains(s.hosts, strings.ToLower(host))
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

// authorized reports whether a request has the run's token. Its connection is kept from then on, however many others come.
func (s *Server) authorized(r *http.Request) bool {
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || subtle.ConstantTimeCompare([]byte(given), []byte(s.token)) != 1 {
		return false
	}
	if c, ok := r.Context().Value(connKey{}).(net.Conn); ok {
		s.unproven.Leave(c)
	}
	return true
}

// wantToken is the answer to a request without the token.
const wantToken = "the run's token is missing or wrong: open the link that the launcher shows"

// events tells a page what happens, until it goes away. Only pages with the token are counted: others must not
// take their places.
func (s *Server) events(w http.ResponseWriter, r *http.Request) {
	if !s.authorized(r) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, wantToken, http.StatusUnauthorized)
		return
	}
	s.mu.Lock()
	full := s.pages >= maxPages
	if !full {
		s.pages++
	}
	s.mu.Unlock()
	if full {
		w.Header().Set("Retry-After", "10")
		http.Error(w, fmt.Sprintf("%d pages are open already", maxPages), http.StatusServiceUnavailable)
		return
	}
	s.tellWatch()
	defer func() {
		s.mu.Lock()
		s.pages--
		s.mu.Unlock()
		s.tellWatch()
	}()
	out := http.NewResponseController(w)
	if out.SetReadDeadline(time.Time{}) != nil { // it would end the request
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	pause := time.NewTimer(0)
	defer pause.Stop()
	var told seen
	for first := true; ; first = false {
		s.mu.Lock()
		f, news := s.board.since(time.Now(), &told)
		changed, closed := s.changed, s.closed
		s.mu.Unlock()
		if news || first {
			text, err := json.Marshal(f)
			if err != nil || send(w, out, "data: "+string(text)) != nil {
				return
			}
		}
		if closed {
			return
		}
		for waiting := true; waiting; {
			select {
			case <-changed:
				waiting = false
			case <-alive.C:
				if send(w, out, ": ") != nil {
					return
				}
			case <-s.end:
				waiting = false
			case <-r.Context().Done():
				return
			}
		}
		pause.Reset(frameEvery)
		select {
		case <-pause.C:
		case <-s.end:
		case <-r.Context().Done():
			return
		}
	}
}

// send writes an event of the page's stream.
func send(w io.Writer, out *http.ResponseController, text string) error {
	if err := out.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return err
	}
	_, err := io.WriteString(w, text+"\n\n")
	return errors.Join(err, out.Flush())
}

// tellWatch tells the run whether pages are open, if it has not heard so.
func (s *Server) tellWatch() {
	s.watching.Lock()
	defer s.watching.Unlock()
	s.mu.Lock()
	on, run := s.pages > 0, s.run
	s.mu.Unlock()
	if run != nil && on != s.watched {
		s.watched = on
		run.Watch(on)
	}
}

// act does what a page asks for.
func (s *Server) act(w http.ResponseWriter, r *http.Request) {
	answer := func(status int, key, text string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(map[string]string{key: text})
	}
	if !s.authorized(r) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		answer(http.StatusUnauthorized, "error", wantToken)
		return
	}
	select {
	case s.acts <- struct{}{}:
		defer func() { <-s.acts }()
	default:
		answer(http.StatusTooManyRequests, "error", "too much is under way")
		return
	}
	var a Action
	in := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	in.DisallowUnknownFields()
	if err := in.Decode(&a); err != nil {
		answer(http.StatusBadRequest, "error", "the request is no action")
		return
	}
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // it would end the request
	if fault := a.fault(); fault != "" {
		answer(http.StatusBadRequest, "error", fault)
		return
	}
	s.mu.Lock()
	run := s.run
	s.mu.Unlock()
	if run == nil {
		answer(http.StatusConflict, "error", "the run has not started yet")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), actTime)
	defer cancel()
	said, err := run.Act(ctx, a)
	if err != nil {
		answer(http.StatusConflict, "error", err.Error())
		return
	}
	answer(http.StatusOK, "said", said)
}

// fault says what is wrong with an action, "" if nothing is.
func (a Action) fault() string {
	switch {
	case !slices.Contains([]string{"kill", "freeze", "thaw", "slow", "leave", "add", "stop"}, a.Do):
		return "do is none of kill, freeze, thaw, slow, leave, add and stop"
	case a.Worker < 0:
		return "worker is below 0"
	case a.Do == "slow" && !(a.Factor > 0 && a.Factor <= 1):
		return "factor is not above 0 to 1"
	}
	return ""
}
