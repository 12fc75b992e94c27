// Package azure stands in for Azure Blob Storage in tests. It answers the few requests that a bucket of checkpoints makes, in memory, and
// knows accounts by name only: it does not check signatures.
package azure

import (
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
)

// Account and Key are the credentials of the only account.
const (
	Account = "account"
	Key     = "a2V5IG9mIHRoZSBhY2NvdW50"
)

// page is how many names a list has at most, fewer than any test writes.
const page = 2

// Server is a server with one empty container.
type Server struct {
	URL string // of the account

	container string
	mu        sync.Mutex
	blobs     map[string][]byte
	blocks    map[string][]byte // of all blobs, by path and number
}

// Serve starts a server, which the test ends.
func Serve(t *testing.T, container string) *Server {
	s := &Server{container: container, blobs: make(map[string][]byte), blocks: make(map[string][]byte)}
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	s.URL = h.URL + "/" + Account
	return s
}

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	at, ok := strings.CutPrefix(r.URL.Path, "/"+Account+"/")
	if !ok || !strings.HasPrefix(r.Header.Get("Authorization"), "SharedKey "+Account+":") {
		fail(w, http.StatusForbidden, "AuthenticationFailed")
		return
	}
	container, name, _ := strings.Cut(at, "/")
	query := r.URL.Query()
	_, there := s.blobs[name]
	switch {
	case container != s.container:
		fail(w, http.StatusNotFound, "ContainerNotFound")
	case query.Get("comp") == "list":
		s.list(w, query.Get("prefix"), query.Get("marker"))
	case r.Method == http.MethodPut && query.Get("comp") == "block":
		s.blocks[name+" "+query.Get("blockid")] = body
		w.WriteHeader(http.StatusCreated)
	case r.Method == http.MethodPut && there && r.Header.Get("If-None-Match") == "*":
		fail(w, http.StatusConflict, "BlobAlreadyExists")
	case r.Method == http.MethodPut && query.Get("comp") == "blocklist":
		var list struct{ Latest []string }
		if err := xml.Unmarshal(body, &list); err != nil {
			fail(w, http.StatusBadRequest, "InvalidXmlDocument")
			return
		}
		var whole []byte
		for _, id := range list.Latest {
			whole = append(whole, s.blocks[name+" "+id]...)
		}
		s.blobs[name] = whole
		w.WriteHeader(http.StatusCreated)
	case r.Method == http.MethodPut:
		s.blobs[name] = body
		w.WriteHeader(http.StatusCreated)
	case !there:
		fail(w, http.StatusNotFound, "BlobNotFound")
	case r.Method == http.MethodGet:
		w.Header().Set("Content-Length", fmt.Sprint(len(s.blobs[name])))
		_, _ = w.Write(s.blobs[name])
	case r.Method == http.MethodDelete:
		delete(s.blobs, name)
		w.WriteHeader(http.StatusAccepted)
	default:
		fail(w, http.StatusMethodNotAllowed, "UnsupportedHttpVerb")
	}
}

func (s *Server) list(w http.ResponseWriter, prefix, from string) {
	type blob struct{ Name string }
	var answer struct {
		XMLName    xml.Name `xml:"EnumerationResults"`
		Blobs      []blob   `xml:"Blobs>Blob"`
		NextMarker string
	}
	var names []string
	for name := range s.blobs {
		if strings.HasPrefix(name, prefix) && name >= from {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	if len(names) > page {
		answer.NextMarker = names[page]
		names = names[:page]
	}
	for _, name := range names {
		answer.Blobs = append(answer.Blobs, blob{name})
	}
	text, err := xml.Marshal(answer)
	if err != nil {
		panic(err)
	}
	if len(names) == 0 {
		text = []byte("<EnumerationResults><Blobs /><NextMarker /></EnumerationResults>")
	}
	w.Header().Set("Content-Type", "application/xml")
	_, _ = w.Write(text)
}

func fail(w http.ResponseWriter, status int, code string) {
	w.Header().Set("x-ms-error-code", code)
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "<Error><Code>%s</Code><Message>It failed.</Message></Error>", code)
}
