// Package kube starts a run over the pods of an Indexed Job: it makes the manifest, and recognises its pods by what the manifest sets.
// The pod of index 0 begins the run, unless others are in it already, and pods find each other by their names in the headless service.
package kube

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/soliton-train/soliton/launcher/internal/meet"
)

// What the manifest sets in each pod. Kubernetes sets the index.
const (
	envIndex = "JOB_COMPLETION_INDEX"
	envHosts = "SOLITON_HOSTS"
	envJob   = "SOLITON_JOB"
	envKey   = "SOLITON_KEY_FILE"
)

// port is where pods give their tickets away. They have addresses of their own.
const port = 29900

// minKey is how long the key of a job is at least, in bytes.
const minKey = 32

// Pod is a pod of the job.
type Pod struct {
	Index int
	Hosts int
	Job   string // name of the job and of the service
	Key   meet.Key
}

// Of returns the pod that this process is in, by its environment; nil where it is in none of a job of ours.
func Of(getenv func(string) string) (*Pod, error) {
	hosts, index := getenv(envHosts), getenv(envIndex)
	if hosts == "" || index == "" {
		return nil, nil
	}
	p := Pod{Job: getenv(envJob)}
	var err error
	if p.Hosts, err = strconv.Atoi(hosts); err != nil || p.Hosts < 1 || p.Hosts > MaxHosts {
		return nil, fmt.Errorf("%s is %.80q: give 1 to %d", envHosts, hosts, MaxHosts)
	}
	if p.Index, err = strconv.Atoi(index); err != nil || p.Index < 0 || p.Index >= MaxHosts { // a job that was scaled has more pods than in the beginning
		return nil, fmt.Errorf("%s is %.80q: give 0 to %d", envIndex, index, MaxHosts-1)
	}
	if !label.MatchString(p.Job) {
		return nil, fmt.Errorf("%s is %.80q: give the name of the job", envJob, p.Job)
	}
	text, err := os.ReadFile(getenv(envKey))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", envKey, err)
	}
	if p.Key = meet.Key(strings.TrimSpace(string(text))); len(p.Key) < minKey {
		return nil, fmt.Errorf("%s: the key has %d bytes, less than %d", envKey, len(p.Key), minKey)
	}
	return &p, nil
}

// Listen returns the listener at which a pod gives its ticket away.
func (p *Pod) Listen() (net.Listener, error) { return net.Listen("tcp", fmt.Sprintf(":%d", port)) }

// Addrs is where a pod looks for the others, the first one first.
func (p *Pod) Addrs() (addrs []string) {
	for i := range p.Hosts {
		if i != p.Index {
			addrs = append(addrs, net.JoinHostPort(fmt.Sprintf("%s-%d.%s", p.Job, i, p.Job), strconv.Itoa(port)))
		}
	}
	return addrs
}

// MaxHosts is the most pods of a job.
const MaxHosts = 64
