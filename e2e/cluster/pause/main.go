// The program of a pod's sandbox container: holds the pod's namespaces until it receives a signal. In a pod with a shared
// process namespace it is process 1, so it also reaps orphaned processes.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && err != syscall.EINTR {
				break
			}
		}
	}
}
