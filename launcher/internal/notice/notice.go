// Package notice asks the metadata server of a cloud whether this machine is about to be taken away, as --notice says.
//
//	aws    a spot instance is interrupted two minutes later; tokens of IMDSv2 are used where the server has them
//	gcp    a spot or preemptible VM is preempted 30 seconds later
//	azure  a scheduled event Preempt or Terminate comes 30 seconds later or more
//
// A server is asked every two seconds, without a proxy, and what it says is bounded. One that does not answer is asked again.
package notice

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

const (
	every   = 2 * time.Second // between two questions
	patient = 2 * time.Second // for an answer
	maxBody = 64 << 10        // of an answer, in bytes
)

// The paths at which clouds say it, which tell a server's kind.
const (
	awsPath   = "/latest/meta-data/spot/instance-action"
	awsToken  = "/latest/api/token"
	gcpPath   = "/computeMetadata/v1/instance/preempted"
	azurePath = "/metadata/scheduledevents"
)

var names = map[string]string{
	"aws":   "http://169.254.169.254" + awsPath,
	"gcp":   "http://metadata.google.internal" + gcpPath,
	"azure": "http://169.254.169.254" + azurePath + "?api-version=2020-07-01",
}

// Source is a metadata server.
type Source struct {
	url  *url.URL
	ask  func(ctx context.Context, s *Source) (notice string, err error)
	http http.Client
}

// Parse reads the value of --notice: aws, gcp or azure, or the URL of a server that answers as one of these does.
func Parse(text string) (*Source, error) {
	at := text
	if known, ok := names[text]; ok {
		at = known
	}
	u, err := url.Parse(at)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("--notice %.200q: give aws, gcp, azure, or the URL of a metadata server", text)
	}
	s := &Source{url: u, http: http.Client{
		Transport:     &http.Transport{Proxy: nil, MaxIdleConns: 1, MaxResponseHeaderBytes: maxBody},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	switch {
	case strings.HasSuffix(u.Path, awsPath):
		s.ask = askAWS
	case strings.HasSuffix(u.Path, gcpPath):
		s.ask = askGCP
	case strings.HasSuffix(u.Path, azurePath):
		s.ask = askAzure
	default:
		return nil, fmt.Errorf("--notice %.200q: its path ends with none of %s, %s and %s", text, awsPath, gcpPath, azurePath)
	}
	return s, nil
}

// Begin watches the source until the function that it returns is called. came is called once, when there is a notice; say is told when
// the server stops to answer.
func (s *Source) Begin(ctx context.Context, say func(text string), came func(notice string)) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		if notice := s.watch(ctx, say); notice != "" {
			came(notice)
		}
	})
	return func() {
		cancel()
		watching.Wait()
		s.http.CloseIdleConnections()
	}
}

// watch returns the notice when there is one, or "" when ctx ends.
func (s *Source) watch(ctx context.Context, say func(text string)) string {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for silent := false; ; {
		asked, cancel := context.WithTimeout(ctx, patient)
		notice, err := s.ask(asked, s)
		cancel()
		switch {
		case ctx.Err() != nil:
			return ""
		case notice != "":
			return notice
		case err != nil && !silent:
			say(fmt.Sprintf("--notice %s does not answer, and is asked again: %v", s.url.Redacted(), err))
		}
		silent = err != nil
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ""
		}
	}
}

// get returns the answer to a request, and its status.
func (s *Source) get(ctx context.Context, method string, at *url.URL, header, value string) (status int, body []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, method, at.String(), nil)
	if err != nil {
		return 0, nil, err
	}
	if header != "" {
		r.Header.Set(header, value)
	}
	answer, err := s.http.Do(r)
	if err != nil {
		return 0, nil, errors.Unwrap(err) // without the URL, which is known
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, maxBody))
	return answer.StatusCode, body, err
}

// unexpected is the error for a status that says nothing.
func unexpected(status int) error { return fmt.Errorf("it answers with status %d", status) }

func askAWS(ctx context.Context, s *Source) (string, error) {
	at := *s.url
	at.Path = strings.TrimSuffix(at.Path, awsPath) + awsToken
	header := ""
	status, token, err := s.get(ctx, http.MethodPut, &at, "X-aws-ec2-metadata-token-ttl-seconds", "60")
	if err != nil {
		return "", err
	}
	if status == http.StatusOK {
		header = "X-aws-ec2-metadata-token"
	}
	status, body, err := s.get(ctx, http.MethodGet, s.url, header, strings.TrimSpace(string(token)))
	switch {
	case err != nil:
		return "", err
	case status == http.StatusNotFound:
		return "", nil // there is no notice
	case status != http.StatusOK:
		return "", unexpected(status)
	}
	var says struct{ Action, Time string }
	if err := json.Unmarshal(body, &says); err != nil || says.Action == "" {
		return "", fmt.Errorf("it does not answer with an action: %.100q", body)
	}
	return fmt.Sprintf("AWS is to %.40s this instance at %.40s", says.Action, says.Time), nil
}

func askGCP(ctx context.Context, s *Source) (string, error) {
	status, body, err := s.get(ctx, http.MethodGet, s.url, "Metadata-Flavor", "Google")
	switch {
	case err != nil:
		return "", err
	case status != http.StatusOK:
		return "", unexpected(status)
	}
	switch text := strings.TrimSpace(string(body)); text {
	case "TRUE":
		return "Google Cloud preempts this machine", nil
	case "FALSE":
		return "", nil
	default:
		return "", fmt.Errorf("it answers %.100q, not TRUE or FALSE", text)
	}
}

func askAzure(ctx context.Context, s *Source) (string, error) {
	status, body, err := s.get(ctx, http.MethodGet, s.url, "Metadata", "true")
	switch {
	case err != nil:
		return "", err
	case status != http.StatusOK:
		return "", unexpected(status)
	}
	var says struct {
		Events []struct{ EventType, NotBefore string }
	}
	if err := json.Unmarshal(body, &says); err != nil {
		return "", fmt.Errorf("it does not answer with events: %.100q", body)
	}
	for _, e := range says.Events {
		if e.EventType == "Preempt" || e.EventType == "Terminate" {
			return fmt.Sprintf("Azure is to %s this machine at %.40s", strings.ToLower(e.EventType), e.NotBefore), nil
		}
	}
	return "", nil
}
